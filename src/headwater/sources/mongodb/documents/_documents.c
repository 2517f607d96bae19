/* Decodes raw BSON documents into the buffers of Arrow columns; headwater.sources.mongodb.documents.layout tells what is
 * asked for and what is given.
 *
 * It does what python_documents.py does, value for value, and one test suite runs over both. Rules:
 * - every read is checked against the end of what holds it; whatever is wrong ends the batch with a ValueError that says
 *   why and holds no value;
 * - nested documents are followed MOST_NESTED levels deep and no further;
 * - no Python object per value: columns grow in memory of their own, without the interpreter's lock, and Arrow takes that
 *   memory without a copy.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <locale.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a column becomes: Kind in types.py. */
enum {
    AS_INT, AS_LONG, AS_DOUBLE, AS_BOOL, AS_STRING, AS_OBJECT_ID, AS_DATE, AS_TIMESTAMP, AS_DECIMAL_TEXT, AS_DECIMAL,
    AS_BINARY, AS_UUID, AS_JSON, AS_KEY, AS_RAW, AS_STRUCT, AS_LIST, AS_DOCUMENT, AS_REST, KINDS
};

/* Types of BSON. */
enum {
    DOUBLE = 1, STRING, OBJECT, ARRAY, BINARY, UNDEFINED, OBJECT_ID, BOOL, DATE, NULL_VALUE, REGEX, DB_POINTER, CODE,
    SYMBOL, CODE_WITH_SCOPE, INT, TIMESTAMP, LONG, DECIMAL, MAX_KEY = 127, MIN_KEY = 255
};

#define FOUND_MIN_KEY (1u << 20)
#define FOUND_MAX_KEY (1u << 21)
#define FOUND_MISSING (1u << 22)
#define FOUND_NO_TEXT (1u << 23)
#define FOUND_INEXACT (1u << 24)
#define FOUND_SUBTYPE (1u << 25)

#define MOST_NESTED 220
#define MOST_CHILDREN 65536
#define MOST_MS (INT64_MAX / 1000)
#define LAST_DATE INT64_C(253402300799999)
#define MOST_DATA INT32_MAX
#define DECIMAL_DIGITS 34

typedef unsigned __int128 uint128;

/* How writing a value ended. */
enum { DONE, WRONG, NO_TEXT };

static const char *const CUT = "a document is cut";
static const char *const VALUE_CUT = "a value is cut";
static const char *const TEXT_CUT = "a text is cut";
static const char *const ENDLESS = "a document does not end where it says";
static const char *const TOO_DEEP = "a document is nested deeper than 220 levels";
static const char *const NO_MEMORY = "no memory";

static locale_t plain_locale; /* numbers with a point, whatever the process is set to */

/* ------------------------------------------------------------------------------------------------ growing bytes */

typedef struct {
    uint8_t *at;
    size_t used, room;
} Bytes;

static bool bytes_grow(Bytes *bytes, size_t more) {
    size_t wanted = bytes->used + more, room = bytes->room < 256 ? 256 : bytes->room;
    while (room < wanted) room += room / 2 + 64;
    uint8_t *at = realloc(bytes->at, room);
    if (at == NULL) return false;
    bytes->at = at;
    bytes->room = room;
    return true;
}

static inline bool bytes_room(Bytes *bytes, size_t more) {
    return bytes->room - bytes->used >= more || bytes_grow(bytes, more);
}

static inline bool put(Bytes *bytes, const void *from, size_t size) {
    if (!bytes_room(bytes, size)) return false;
    memcpy(bytes->at + bytes->used, from, size);
    bytes->used += size;
    return true;
}

static inline bool put_byte(Bytes *bytes, uint8_t byte) {
    if (!bytes_room(bytes, 1)) return false;
    bytes->at[bytes->used++] = byte;
    return true;
}

#define PUT_TEXT(bytes, text) put(bytes, text, sizeof(text) - 1)

/* ------------------------------------------------------------------------------------------------ columns */

typedef struct Node {
    uint8_t *name; /* with the zero at its end */
    uint32_t name_size;
    uint8_t kind, digits, scale, width, required;
    uint32_t count, slots; /* children, and places of the table that finds them by name */
    struct Node *children;
    int32_t *table;
    int32_t same, follow; /* the next sibling of the same name, or -1; the sibling that is expected next */
    int64_t length, nulls, conflicts;
    uint32_t found;
    Bytes valid, values, data;
    size_t began; /* AS_REST: where the text of this row begins */
    uint8_t open, bad;
} Node;

typedef struct {
    Node root;
    bool busy;
} Plan;

typedef struct {
    const char *wrong;
} State;

static inline int wrong(State *state, const char *reason) {
    state->wrong = reason;
    return WRONG;
}

static inline bool has_data(const Node *node) {
    return (node->kind >= AS_STRING && node->kind <= AS_OBJECT_ID) || node->kind == AS_DECIMAL_TEXT ||
           (node->kind >= AS_BINARY && node->kind <= AS_RAW) || node->kind >= AS_DOCUMENT;
}

static bool node_begin(Node *node) {
    node->length = node->nulls = node->conflicts = 0;
    node->found = 0;
    node->valid.used = node->values.used = node->data.used = 0;
    node->open = node->bad = 0;
    static const int32_t zero = 0;
    if ((has_data(node) || node->kind == AS_LIST) && !put(&node->values, &zero, 4)) return false;
    for (uint32_t place = 0; place < node->count; place++)
        if (!node_begin(&node->children[place])) return false;
    return true;
}

/* One more value is there: its bit. */
static inline int close_valid(State *state, Node *node) {
    if (node->nulls && (node->length & 7) == 0 && !put_byte(&node->valid, 0xFF)) return wrong(state, NO_MEMORY);
    node->length++;
    return DONE;
}

static inline int close_data(State *state, Node *node) {
    if (node->data.used > MOST_DATA) return wrong(state, "a column has more than 2 GiB");
    int32_t end = (int32_t)node->data.used;
    if (!put(&node->values, &end, 4)) return wrong(state, NO_MEMORY);
    return close_valid(state, node);
}

static int add_null(State *state, Node *node) {
    if (node->nulls == 0) {
        size_t bytes = (size_t)(node->length >> 3) + 1;
        node->valid.used = 0;
        if (!bytes_room(&node->valid, bytes)) return wrong(state, NO_MEMORY);
        memset(node->valid.at, 0xFF, bytes);
        node->valid.used = bytes;
    } else if ((node->length & 7) == 0 && !put_byte(&node->valid, 0xFF)) {
        return wrong(state, NO_MEMORY);
    }
    node->valid.at[node->length >> 3] &= (uint8_t)~(1u << (node->length & 7));
    node->nulls++;
    if (node->kind == AS_STRUCT) {
        for (uint32_t place = 0; place < node->count; place++)
            if (add_null(state, &node->children[place]) != DONE) return WRONG;
    } else if (node->kind == AS_BOOL) {
        if ((node->length & 7) == 0 && !put_byte(&node->values, 0)) return wrong(state, NO_MEMORY);
    } else if (node->kind == AS_LIST || has_data(node)) {
        if (!bytes_room(&node->values, 4)) return wrong(state, NO_MEMORY);
        memcpy(node->values.at + node->values.used, node->values.at + node->values.used - 4, 4);
        node->values.used += 4;
    } else {
        if (!bytes_room(&node->values, node->width)) return wrong(state, NO_MEMORY);
        memset(node->values.at + node->values.used, 0, node->width);
        node->values.used += node->width;
    }
    node->length++;
    return DONE;
}

static int refuse(State *state, Node *node, uint32_t found) {
    node->conflicts++;
    node->found |= found;
    return add_null(state, node);
}

static inline uint32_t found_bit(uint8_t kind) {
    return kind == MIN_KEY ? FOUND_MIN_KEY : kind == MAX_KEY ? FOUND_MAX_KEY : 1u << kind;
}

/* ------------------------------------------------------------------------------------------------ elements */

static inline int32_t int32_at(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline int64_t int64_at(const uint8_t *at) {
    int64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* Where the document that begins at *at* ends, or NULL. */
static inline const uint8_t *document_end(State *state, const uint8_t *at, const uint8_t *end) {
    if (end - at < 5) {
        state->wrong = CUT;
        return NULL;
    }
    int32_t size = int32_at(at);
    if (size < 5 || size > end - at) {
        state->wrong = CUT;
        return NULL;
    }
    if (at[size - 1] != 0) {
        state->wrong = ENDLESS;
        return NULL;
    }
    return at + size;
}

static inline const uint8_t *string_end(State *state, const uint8_t *at, const uint8_t *end) {
    if (end - at < 5) {
        state->wrong = VALUE_CUT;
        return NULL;
    }
    int32_t size = int32_at(at);
    if (size < 1 || size > end - at - 4 || at[3 + (size_t)size] != 0) {
        state->wrong = TEXT_CUT;
        return NULL;
    }
    return at + 4 + size;
}

static const uint8_t *cstring_end(State *state, const uint8_t *at, const uint8_t *end) {
    const uint8_t *zero = end > at ? memchr(at, 0, (size_t)(end - at)) : NULL;
    if (zero == NULL) {
        state->wrong = TEXT_CUT;
        return NULL;
    }
    return zero + 1;
}

static const uint8_t *scoped_end(State *state, const uint8_t *at, const uint8_t *end) {
    if (end - at < 4) {
        state->wrong = VALUE_CUT;
        return NULL;
    }
    int32_t size = int32_at(at);
    if (size < 4 || size > end - at) {
        state->wrong = VALUE_CUT;
        return NULL;
    }
    const uint8_t *stop = at + size, *middle = string_end(state, at + 4, stop);
    if (middle == NULL) return NULL;
    const uint8_t *found = document_end(state, middle, stop);
    if (found != NULL && found != stop) {
        state->wrong = ENDLESS;
        return NULL;
    }
    return found;
}

/* Where a value ends, or NULL. */
static inline const uint8_t *value_end(State *state, uint8_t kind, const uint8_t *at, const uint8_t *end) {
    ptrdiff_t fixed;
    switch (kind) {
    case DOUBLE:
    case DATE:
    case TIMESTAMP:
    case LONG:
        fixed = 8;
        break;
    case INT:
        fixed = 4;
        break;
    case OBJECT_ID:
        fixed = 12;
        break;
    case DECIMAL:
        fixed = 16;
        break;
    case UNDEFINED:
    case NULL_VALUE:
    case MIN_KEY:
    case MAX_KEY:
        return at;
    case BOOL:
        if (end - at >= 1 && at[0] > 1) {
            state->wrong = "a bool is neither 0 nor 1";
            return NULL;
        }
        fixed = 1;
        break;
    case STRING:
    case CODE:
    case SYMBOL:
        return string_end(state, at, end);
    case OBJECT:
    case ARRAY:
        return document_end(state, at, end);
    case BINARY:
        fixed = 5;
        if (end - at >= 5) {
            int32_t size = int32_at(at);
            fixed = size < 0 ? PTRDIFF_MAX : (ptrdiff_t)size + 5;
        }
        break;
    case REGEX: {
        const uint8_t *middle = cstring_end(state, at, end);
        return middle == NULL ? NULL : cstring_end(state, middle, end);
    }
    case DB_POINTER: {
        at = string_end(state, at, end);
        if (at == NULL) return NULL;
        fixed = 12;
        break;
    }
    case CODE_WITH_SCOPE:
        return scoped_end(state, at, end);
    default:
        state->wrong = "a value has no type of BSON";
        return NULL;
    }
    if (end - at < fixed) {
        state->wrong = VALUE_CUT;
        return NULL;
    }
    return at + fixed;
}

/* The next element of a document whose last byte is before *end*; false: state->wrong. */
typedef struct {
    uint8_t kind;
    const uint8_t *name, *start, *stop;
    size_t name_size;
} Element;

static inline bool next_element(State *state, const uint8_t *at, const uint8_t *end, Element *element) {
    element->kind = *at++;
    const uint8_t *zero = end > at ? memchr(at, 0, (size_t)(end - at)) : NULL;
    if (zero == NULL) {
        state->wrong = "the name of a field is cut";
        return false;
    }
    element->name = at;
    element->name_size = (size_t)(zero - at);
    element->start = zero + 1;
    element->stop = value_end(state, element->kind, zero + 1, end);
    return element->stop != NULL;
}

/* ------------------------------------------------------------------------------------------------ texts */

static bool is_utf8(const uint8_t *at, size_t size) {
    const uint8_t *end = at + size;
    while (at < end) {
        if (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, 8);
            if ((word & UINT64_C(0x8080808080808080)) == 0) {
                at += 8;
                continue;
            }
        }
        uint8_t first = *at;
        if (first < 0x80) {
            at++;
            continue;
        }
        int more = first >= 0xC2 && first <= 0xDF ? 1 : (first & 0xF0) == 0xE0 ? 2 : first >= 0xF0 && first <= 0xF4 ? 3 : 0;
        if (more == 0 || end - at <= more) return false;
        uint8_t low = 0x80, high = 0xBF;
        if (first == 0xE0) low = 0xA0;
        if (first == 0xED) high = 0x9F; /* no halves of a pair */
        if (first == 0xF0) low = 0x90;
        if (first == 0xF4) high = 0x8F;
        if (at[1] < low || at[1] > high) return false;
        for (int place = 2; place <= more; place++)
            if ((at[place] & 0xC0) != 0x80) return false;
        at += more + 1;
    }
    return true;
}

static const char HEX[] = "0123456789abcdef";

static bool put_hex(Bytes *to, const uint8_t *from, size_t size) {
    if (!bytes_room(to, 2 * size)) return false;
    for (size_t place = 0; place < size; place++) {
        to->at[to->used++] = (uint8_t)HEX[from[place] >> 4];
        to->at[to->used++] = (uint8_t)HEX[from[place] & 15];
    }
    return true;
}

static bool put_whole(Bytes *to, int64_t number) {
    uint8_t text[20], *at = text + sizeof text;
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do *--at = (uint8_t)('0' + left % 10);
    while ((left /= 10) != 0);
    if (number < 0) *--at = '-';
    return put(to, at, (size_t)(text + sizeof text - at));
}

/* A text in quotes, as JSON has it. */
static int put_quoted(State *state, Bytes *to, const uint8_t *from, size_t size) {
    if (!is_utf8(from, size)) return NO_TEXT;
    if (!bytes_room(to, size + 2)) return wrong(state, NO_MEMORY);
    to->at[to->used++] = '"';
    const uint8_t *end = from + size;
    while (from < end) {
        const uint8_t *plain = from;
        while (plain < end && *plain >= 0x20 && *plain != '"' && *plain != '\\') plain++;
        if (!put(to, from, (size_t)(plain - from))) return wrong(state, NO_MEMORY);
        from = plain;
        if (from == end) break;
        uint8_t sign = *from++;
        uint8_t text[6] = {'\\', sign, '0', '0', (uint8_t)HEX[sign >> 4], (uint8_t)HEX[sign & 15]};
        size_t length = 2;
        switch (sign) {
        case '"':
        case '\\': break;
        case '\b': text[1] = 'b'; break;
        case '\f': text[1] = 'f'; break;
        case '\n': text[1] = 'n'; break;
        case '\r': text[1] = 'r'; break;
        case '\t': text[1] = 't'; break;
        default: text[1] = 'u', length = 6;
        }
        if (!put(to, text, length)) return wrong(state, NO_MEMORY);
    }
    return put_byte(to, '"') ? DONE : wrong(state, NO_MEMORY);
}

static bool put_base64(Bytes *to, const uint8_t *from, size_t size) {
    static const char SIGNS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (!bytes_room(to, (size + 2) / 3 * 4)) return false;
    uint8_t *at = to->at + to->used;
    for (size_t place = 0; place < size; place += 3) {
        size_t left = size - place;
        uint32_t three = (uint32_t)from[place] << 16;
        if (left > 1) three |= (uint32_t)from[place + 1] << 8;
        if (left > 2) three |= from[place + 2];
        *at++ = (uint8_t)SIGNS[three >> 18];
        *at++ = (uint8_t)SIGNS[three >> 12 & 63];
        *at++ = left > 1 ? (uint8_t)SIGNS[three >> 6 & 63] : '=';
        *at++ = left > 2 ? (uint8_t)SIGNS[three & 63] : '=';
    }
    to->used += (size + 2) / 3 * 4;
    return true;
}

/* The fewest of 15 to 17 digits that give the number back. */
static bool put_double(Bytes *to, double number) {
    if (isnan(number)) return PUT_TEXT(to, "{\"$numberDouble\":\"NaN\"}");
    if (isinf(number))
        return number > 0 ? PUT_TEXT(to, "{\"$numberDouble\":\"Infinity\"}")
                          : PUT_TEXT(to, "{\"$numberDouble\":\"-Infinity\"}");
    double amount = fabs(number);
    if (amount < 1e15 && (amount >= 1e-4 || amount == 0)) {
        /* with up to 15 digits a decimal number and its double name each other */
        static const double POWERS[] = {1, 10, 100, 1e3, 1e4, 1e5, 1e6};
        for (int places = 0; places <= 6; places++) {
            double scaled = amount * POWERS[places];
            if (scaled >= 1e15) break;
            uint64_t whole = (uint64_t)(scaled + 0.5);
            if ((double)whole / POWERS[places] != amount) continue;
            uint8_t text[24], *at = text + sizeof text;
            int digits = 0;
            if (places == 0) *--at = '0', *--at = '.';
            do {
                *--at = (uint8_t)('0' + whole % 10);
                whole /= 10;
                if (++digits == places) *--at = '.';
            } while (whole != 0 || digits <= places);
            if (signbit(number)) *--at = '-';
            return put(to, at, (size_t)(text + sizeof text - at));
        }
    }
    char text[40];
    int size = 0;
    for (int digits = 15; digits <= 17; digits++) {
        size = snprintf(text, sizeof text - 2, "%.*g", digits, number);
        if (digits == 17 || strtod(text, NULL) == number) break;
    }
    if (strpbrk(text, ".e") == NULL) text[size++] = '.', text[size++] = '0';
    return put(to, text, (size_t)size);
}

static void two_digits(uint8_t *to, int64_t number) {
    to[0] = (uint8_t)('0' + number / 10);
    to[1] = (uint8_t)('0' + number % 10);
}

/* A date from 1970 to 9999. */
static bool put_date(Bytes *to, int64_t ms) {
    int64_t days = ms / 86400000 + 719468, left = ms % 86400000;
    int64_t era = days / 146097, of_era = days % 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    int64_t day = of_year - (153 * month + 2) / 5 + 1;
    month += month < 10 ? 3 : -9;
    year += era * 400 + (month <= 2);
    uint8_t text[24] = "0000-00-00T00:00:00.000Z";
    two_digits(text, year / 100);
    two_digits(text + 2, year % 100);
    two_digits(text + 5, month);
    two_digits(text + 8, day);
    two_digits(text + 11, left / 3600000);
    two_digits(text + 14, left / 60000 % 60);
    two_digits(text + 17, left / 1000 % 60);
    if (left % 1000 == 0) {
        text[19] = 'Z';
        return put(to, text, 20);
    }
    text[20] = (uint8_t)('0' + left % 1000 / 100);
    two_digits(text + 21, left % 100);
    return put(to, text, 24);
}

/* ------------------------------------------------------------------------------------------------ decimals */

typedef struct {
    bool negative;
    enum { NUMBER, NOT_A_NUMBER, INFINITE } special;
    uint128 coefficient;
    int exponent, count;
    uint8_t digits[40]; /* of the coefficient, as characters; "0" for zero */
} Decimal;

static void set_digits(Decimal *decimal, uint128 coefficient) {
    uint8_t turned[40];
    int count = 0;
    decimal->coefficient = coefficient;
    while (coefficient >> 64) turned[count++] = (uint8_t)('0' + (int)(coefficient % 10)), coefficient /= 10;
    uint64_t left = (uint64_t)coefficient;
    while (left) turned[count++] = (uint8_t)('0' + left % 10), left /= 10;
    if (count == 0) turned[count++] = '0';
    for (int place = 0; place < count; place++) decimal->digits[place] = turned[count - 1 - place];
    decimal->count = count;
}

static void read_decimal(const uint8_t *at, Decimal *decimal) {
    uint64_t low = (uint64_t)int64_at(at), high = (uint64_t)int64_at(at + 8);
    decimal->negative = high >> 63;
    decimal->special = NUMBER;
    decimal->exponent = 0;
    uint128 coefficient = 0;
    unsigned five = high >> 58 & 31;
    if (five == 31) {
        decimal->special = NOT_A_NUMBER;
        decimal->negative = false;
    } else if (five == 30) {
        decimal->special = INFINITE;
    } else if ((high >> 61 & 3) == 3) {
        /* a coefficient of more digits than there are: zero, says the standard */
        decimal->exponent = (int)(high >> 47 & 0x3FFF) - 6176;
    } else {
        decimal->exponent = (int)(high >> 49 & 0x3FFF) - 6176;
        coefficient = (uint128)(high & ((UINT64_C(1) << 49) - 1)) << 64 | low;
    }
    set_digits(decimal, coefficient);
    if (decimal->count > DECIMAL_DIGITS) set_digits(decimal, 0);
}

static void whole_decimal(int64_t number, Decimal *decimal) {
    decimal->negative = number < 0;
    decimal->special = NUMBER;
    decimal->exponent = 0;
    set_digits(decimal, number < 0 ? 0 - (uint64_t)number : (uint64_t)number);
}

static bool put_decimal(Bytes *to, const Decimal *decimal) {
    uint8_t text[80], *at = text;
    const uint8_t *digits = decimal->digits;
    int count = decimal->count, exponent = decimal->exponent, adjusted = exponent + count - 1;
    if (decimal->special == NOT_A_NUMBER) return PUT_TEXT(to, "NaN");
    if (decimal->negative) *at++ = '-';
    if (decimal->special == INFINITE) {
        memcpy(at, "Infinity", 8);
        at += 8;
    } else if (exponent > 0 || adjusted < -6) {
        *at++ = digits[0];
        if (count > 1) {
            *at++ = '.';
            memcpy(at, digits + 1, (size_t)count - 1);
            at += count - 1;
        }
        at += snprintf((char *)at, 16, "E%+d", adjusted);
    } else {
        int whole = count + exponent;
        if (whole > 0) {
            memcpy(at, digits, (size_t)whole);
            at += whole;
            if (exponent < 0) {
                *at++ = '.';
                memcpy(at, digits + whole, (size_t)(count - whole));
                at += count - whole;
            }
        } else {
            *at++ = '0', *at++ = '.';
            for (int place = 0; place < -whole; place++) *at++ = '0';
            memcpy(at, digits, (size_t)count);
            at += count;
        }
    }
    return put(to, text, (size_t)(at - text));
}

/* The number of units of the column's scale that it is, in four words, least first; false: it is none. */
static bool to_units(const Node *node, const Decimal *decimal, uint64_t *words) {
    memset(words, 0, 32);
    if (decimal->special != NUMBER) return false;
    if (decimal->coefficient == 0) return !decimal->negative;
    int shift = decimal->exponent + node->scale;
    uint128 left = decimal->coefficient;
    if (decimal->count + shift > node->digits || decimal->count + shift < 1) return false;
    for (; shift < 0; shift++) {
        if (left % 10) return false;
        left /= 10;
    }
    words[0] = (uint64_t)left;
    words[1] = (uint64_t)(left >> 64);
    for (; shift > 0; shift--) {
        uint128 carry = 0;
        for (int word = 0; word < 4; word++) {
            carry += (uint128)words[word] * 10;
            words[word] = (uint64_t)carry;
            carry >>= 64;
        }
    }
    if (decimal->negative) {
        uint64_t carry = 1;
        for (int word = 0; word < 4; word++) {
            words[word] = ~words[word] + carry;
            carry = carry && words[word] == 0;
        }
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------ extended JSON */

static int put_document(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array);

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) return wrong(state, NO_MEMORY);                                                              \
    } while (0)

/* Subtype and bytes; the old subtype 2 has its length twice. */
static bool binary_content(State *state, const uint8_t **start, const uint8_t *stop, uint8_t *subtype) {
    *subtype = (*start)[4];
    if (*subtype == 2) {
        if (stop - *start < 9 || int32_at(*start + 5) != stop - *start - 9) {
            state->wrong = "bytes of subtype 2 are cut";
            return false;
        }
        *start += 9;
    } else {
        *start += 5;
    }
    return true;
}

static int put_value(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    int ended;
    switch (kind) {
    case DOUBLE: {
        double number;
        memcpy(&number, start, 8);
        MUST(put_double(to, number));
        return DONE;
    }
    case STRING:
        return put_quoted(state, to, start + 4, (size_t)(stop - start) - 5);
    case OBJECT:
    case ARRAY:
        return put_document(state, to, start, stop, depth + 1, kind == ARRAY);
    case BINARY: {
        uint8_t subtype;
        if (!binary_content(state, &start, stop, &subtype)) return WRONG;
        MUST(PUT_TEXT(to, "{\"$binary\":{\"base64\":\"") && put_base64(to, start, (size_t)(stop - start)) &&
             PUT_TEXT(to, "\",\"subType\":\"") && put_hex(to, &subtype, 1) && PUT_TEXT(to, "\"}}"));
        return DONE;
    }
    case UNDEFINED:
        MUST(PUT_TEXT(to, "{\"$undefined\":true}"));
        return DONE;
    case OBJECT_ID:
        MUST(PUT_TEXT(to, "{\"$oid\":\"") && put_hex(to, start, 12) && PUT_TEXT(to, "\"}"));
        return DONE;
    case BOOL:
        MUST(*start ? PUT_TEXT(to, "true") : PUT_TEXT(to, "false"));
        return DONE;
    case DATE: {
        int64_t ms = int64_at(start);
        if (ms >= 0 && ms <= LAST_DATE) {
            MUST(PUT_TEXT(to, "{\"$date\":\"") && put_date(to, ms) && PUT_TEXT(to, "\"}"));
        } else {
            MUST(PUT_TEXT(to, "{\"$date\":{\"$numberLong\":\"") && put_whole(to, ms) && PUT_TEXT(to, "\"}}"));
        }
        return DONE;
    }
    case NULL_VALUE:
        MUST(PUT_TEXT(to, "null"));
        return DONE;
    case REGEX: {
        const uint8_t *middle = cstring_end(state, start, stop);
        if (middle == NULL) return WRONG;
        MUST(PUT_TEXT(to, "{\"$regularExpression\":{\"pattern\":"));
        if ((ended = put_quoted(state, to, start, (size_t)(middle - start) - 1)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"options\":"));
        if ((ended = put_quoted(state, to, middle, (size_t)(stop - middle) - 1)) != DONE) return ended;
        MUST(PUT_TEXT(to, "}}"));
        return DONE;
    }
    case DB_POINTER:
        MUST(PUT_TEXT(to, "{\"$dbPointer\":{\"$ref\":"));
        if ((ended = put_quoted(state, to, start + 4, (size_t)(stop - start) - 17)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"$id\":{\"$oid\":\"") && put_hex(to, stop - 12, 12) && PUT_TEXT(to, "\"}}}"));
        return DONE;
    case CODE:
    case SYMBOL:
        MUST(kind == CODE ? PUT_TEXT(to, "{\"$code\":") : PUT_TEXT(to, "{\"$symbol\":"));
        if ((ended = put_quoted(state, to, start + 4, (size_t)(stop - start) - 5)) != DONE) return ended;
        MUST(put_byte(to, '}'));
        return DONE;
    case CODE_WITH_SCOPE: {
        const uint8_t *middle = string_end(state, start + 4, stop);
        if (middle == NULL) return WRONG;
        MUST(PUT_TEXT(to, "{\"$code\":"));
        if ((ended = put_quoted(state, to, start + 8, (size_t)(middle - start) - 9)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"$scope\":"));
        if ((ended = put_document(state, to, middle, stop, depth + 1, false)) != DONE) return ended;
        MUST(put_byte(to, '}'));
        return DONE;
    }
    case INT:
        MUST(put_whole(to, int32_at(start)));
        return DONE;
    case LONG:
        MUST(put_whole(to, int64_at(start)));
        return DONE;
    case TIMESTAMP:
        MUST(PUT_TEXT(to, "{\"$timestamp\":{\"t\":") && put_whole(to, (uint32_t)int32_at(start + 4)) &&
             PUT_TEXT(to, ",\"i\":") && put_whole(to, (uint32_t)int32_at(start)) && PUT_TEXT(to, "}}"));
        return DONE;
    case DECIMAL: {
        Decimal decimal;
        read_decimal(start, &decimal);
        MUST(PUT_TEXT(to, "{\"$numberDecimal\":\"") && put_decimal(to, &decimal) && PUT_TEXT(to, "\"}"));
        return DONE;
    }
    case MIN_KEY:
        MUST(PUT_TEXT(to, "{\"$minKey\":1}"));
        return DONE;
    default:
        MUST(PUT_TEXT(to, "{\"$maxKey\":1}"));
        return DONE;
    }
}

static int put_field(State *state, Bytes *to, const Element *element, int depth) {
    int ended = put_quoted(state, to, element->name, element->name_size);
    if (ended != DONE) return ended;
    MUST(put_byte(to, ':'));
    return put_value(state, to, element->kind, element->start, element->stop, depth);
}

static int put_document(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    MUST(put_byte(to, is_array ? '[' : '{'));
    bool first = true;
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        if (!first) MUST(put_byte(to, ','));
        first = false;
        int ended = is_array ? put_value(state, to, element.kind, element.start, element.stop, depth)
                             : put_field(state, to, &element, depth);
        if (ended != DONE) return ended;
    }
    MUST(put_byte(to, is_array ? ']' : '}'));
    return DONE;
}

/* ------------------------------------------------------------------------------------------------ order of keys */

static int put_key(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static uint8_t key_class(uint8_t kind) {
    static const uint8_t CLASSES[20] = {0,    0x0A, 0x0F, 0x14, 0x19, 0x1E, 0x02, 0x23, 0x28, 0x2D,
                                        0x05, 0x32, 0x37, 0x3C, 0x0F, 0x41, 0x0A, 0x2F, 0x0A, 0x0A};
    return kind == MIN_KEY ? 0x01 : kind == MAX_KEY ? 0x7F : CLASSES[kind];
}

/* 0.d1d2… * 10^exponent, where the first digit is not 0. */
static bool put_number(Bytes *to, bool negative, const uint8_t *digits, int count, int exponent) {
    uint8_t turn = negative ? 0xFF : 0;
    unsigned biased = (unsigned)(exponent + 0x4000);
    while (digits[count - 1] == '0') count--;
    if (!bytes_room(to, (size_t)count / 2 + 5)) return false;
    uint8_t *at = to->at + to->used;
    *at++ = negative ? 0x03 : 0x05;
    *at++ = (uint8_t)(biased >> 8) ^ turn;
    *at++ = (uint8_t)biased ^ turn;
    for (int place = 0; place < count; place += 2) {
        int low = place + 1 < count ? digits[place + 1] - '0' : 0;
        *at++ = (uint8_t)((digits[place] - '0') * 10 + low + 1) ^ turn;
    }
    *at++ = turn;
    to->used = (size_t)(at - to->at);
    return true;
}

static bool put_decimal_key(Bytes *to, const Decimal *decimal) {
    if (decimal->special == NOT_A_NUMBER) return put_byte(to, 0x01);
    if (decimal->special == INFINITE) return put_byte(to, decimal->negative ? 0x02 : 0x06);
    if (decimal->coefficient == 0) return put_byte(to, 0x04);
    return put_number(to, decimal->negative, decimal->digits, decimal->count, decimal->exponent + decimal->count);
}

static bool put_double_key(Bytes *to, double number) {
    if (isnan(number)) return put_byte(to, 0x01);
    if (isinf(number)) return put_byte(to, number < 0 ? 0x02 : 0x06);
    if (fabs(number) < 9e18 && number == (double)(int64_t)number) {
        Decimal decimal;
        whole_decimal((int64_t)number, &decimal);
        return put_decimal_key(to, &decimal);
    }
    /* a double has no more than 767 digits: this is all of it */
    char text[800];
    snprintf(text, sizeof text, "%.766e", fabs(number));
    int exponent = atoi(strchr(text, 'e') + 1);
    text[1] = text[0]; /* over the point */
    return put_number(to, number < 0, (const uint8_t *)text + 1, 767, exponent + 1);
}

static bool put_string_key(Bytes *to, const uint8_t *from, size_t size) {
    const uint8_t *end = from + size;
    for (;;) {
        const uint8_t *zero = from < end ? memchr(from, 0, (size_t)(end - from)) : NULL;
        if (!put(to, from, (size_t)((zero == NULL ? end : zero) - from))) return false;
        if (zero == NULL) return put(to, "\0\0", 2);
        if (!put(to, "\0\xff", 2)) return false;
        from = zero + 1;
    }
}

static bool put_big(Bytes *to, uint64_t number, int bytes) {
    if (!bytes_room(to, (size_t)bytes)) return false;
    for (int place = bytes - 1; place >= 0; place--) to->at[to->used++] = (uint8_t)(number >> (8 * place));
    return true;
}

static int put_key_rest(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static int put_object_key(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        MUST(put_byte(to, key_class(element.kind)));
        if (!is_array) MUST(put(to, element.name, element.name_size + 1));
        if (put_key_rest(state, to, element.kind, element.start, element.stop, depth) != DONE) return WRONG;
    }
    MUST(put_byte(to, 0));
    return DONE;
}

static int put_key_rest(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    Decimal decimal;
    switch (kind) {
    case INT:
    case LONG:
        whole_decimal(kind == INT ? int32_at(start) : int64_at(start), &decimal);
        MUST(put_decimal_key(to, &decimal));
        return DONE;
    case DOUBLE: {
        double number;
        memcpy(&number, start, 8);
        MUST(put_double_key(to, number));
        return DONE;
    }
    case DECIMAL:
        read_decimal(start, &decimal);
        MUST(put_decimal_key(to, &decimal));
        return DONE;
    case STRING:
    case SYMBOL:
    case CODE:
        MUST(put_string_key(to, start + 4, (size_t)(stop - start) - 5));
        return DONE;
    case OBJECT:
    case ARRAY:
        return put_object_key(state, to, start, stop, depth + 1, kind == ARRAY);
    case BINARY:
        MUST(put_big(to, (uint64_t)(stop - start) - 5, 4) && put(to, start + 4, (size_t)(stop - start) - 4));
        return DONE;
    case DATE:
        MUST(put_big(to, (uint64_t)int64_at(start) ^ UINT64_C(1) << 63, 8));
        return DONE;
    case TIMESTAMP:
        MUST(put_big(to, (uint64_t)int64_at(start), 8));
        return DONE;
    case DB_POINTER:
        MUST(put_big(to, (uint64_t)(stop - start) - 17, 4) && put(to, start + 4, (size_t)(stop - start) - 17) &&
             put(to, stop - 12, 12));
        return DONE;
    case CODE_WITH_SCOPE: {
        const uint8_t *middle = string_end(state, start + 4, stop);
        if (middle == NULL) return WRONG;
        MUST(put_string_key(to, start + 8, (size_t)(middle - start) - 9));
        return put_object_key(state, to, middle, stop, depth + 1, false);
    }
    default: /* ObjectId, bool, and regex as it stands; nothing of the others */
        MUST(put(to, start, (size_t)(stop - start)));
        return DONE;
    }
}

static int put_key(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    MUST(put_byte(to, key_class(kind)));
    return put_key_rest(state, to, kind, start, stop, depth);
}

/* ------------------------------------------------------------------------------------------------ values */

static int take_fields(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth, Node *root);

static inline int add_fixed(State *state, Node *node, const void *value) {
    MUST(put(&node->values, value, node->width));
    return close_valid(state, node);
}

static inline int add_data(State *state, Node *node, const void *from, size_t size) {
    MUST(put(&node->data, from, size));
    return close_data(state, node);
}

static int take_whole(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    int64_t number;
    if (kind == INT) {
        number = int32_at(start);
    } else if (kind == LONG) {
        number = int64_at(start);
    } else if (kind == DOUBLE) {
        double real;
        memcpy(&real, start, 8);
        if (!(real >= -9223372036854775808.0 && real < 9223372036854775808.0)) return refuse(state, node, FOUND_INEXACT);
        number = (int64_t)real;
        if ((double)number != real || (number == 0 && signbit(real))) return refuse(state, node, FOUND_INEXACT);
    } else {
        return refuse(state, node, found_bit(kind));
    }
    if (node->kind == AS_INT) {
        int32_t narrow = (int32_t)number;
        if (narrow != number) return refuse(state, node, FOUND_INEXACT);
        return add_fixed(state, node, &narrow);
    }
    return add_fixed(state, node, &number);
}

static int take_double(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    if (kind == DOUBLE) return add_fixed(state, node, start);
    if (kind != INT && kind != LONG) return refuse(state, node, found_bit(kind));
    int64_t number = kind == INT ? int32_at(start) : int64_at(start);
    double real = (double)number;
    if (real >= 9223372036854775808.0 || (int64_t)real != number) return refuse(state, node, FOUND_INEXACT);
    return add_fixed(state, node, &real);
}

static int take_decimal(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    Decimal decimal;
    if (kind == DECIMAL) read_decimal(start, &decimal);
    else if (kind == INT || kind == LONG) whole_decimal(kind == INT ? int32_at(start) : int64_at(start), &decimal);
    else return refuse(state, node, found_bit(kind));
    if (node->kind == AS_DECIMAL_TEXT) {
        MUST(put_decimal(&node->data, &decimal));
        return close_data(state, node);
    }
    uint64_t words[4];
    if (!to_units(node, &decimal, words)) return refuse(state, node, FOUND_INEXACT);
    return add_fixed(state, node, words);
}

static int take_bytes(State *state, Node *node, const uint8_t *start, const uint8_t *stop) {
    uint8_t subtype;
    if (!binary_content(state, &start, stop, &subtype)) return WRONG;
    if (node->kind == AS_BINARY && subtype == node->scale) return add_data(state, node, start, (size_t)(stop - start));
    if (node->kind == AS_BINARY || subtype != 4 || stop - start != 16) return refuse(state, node, FOUND_SUBTYPE);
    static const uint8_t PARTS[5] = {4, 2, 2, 2, 6};
    for (int part = 0; part < 5; part++) {
        if (part) MUST(put_byte(&node->data, '-'));
        MUST(put_hex(&node->data, start, PARTS[part]));
        start += PARTS[part];
    }
    return close_data(state, node);
}

/* Ends a value that was written to the data of *node* from *began* on. */
static int close_written(State *state, Node *node, size_t began, int ended) {
    if (ended == DONE) return close_data(state, node);
    node->data.used = began;
    return ended == NO_TEXT ? refuse(state, node, FOUND_NO_TEXT) : WRONG;
}

static int take(State *state, Node *node, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static int take_list(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        if (take(state, node->children, element.kind, element.start, element.stop, depth) != DONE) return WRONG;
    }
    if (node->children->length > INT32_MAX) return wrong(state, "a column has more than 2 GiB");
    int32_t length = (int32_t)node->children->length;
    MUST(put(&node->values, &length, 4));
    return close_valid(state, node);
}

static int take(State *state, Node *node, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    size_t began = node->data.used;
    if (node->kind == AS_KEY)
        return close_written(state, node, began, put_key(state, &node->data, kind, start, stop, depth));
    if (kind == NULL_VALUE) return node->required ? refuse(state, node, found_bit(kind)) : add_null(state, node);
    switch (node->kind) {
    case AS_INT:
    case AS_LONG:
        return take_whole(state, node, kind, start);
    case AS_DOUBLE:
        return take_double(state, node, kind, start);
    case AS_BOOL:
        if (kind != BOOL) break;
        if ((node->length & 7) == 0) MUST(put_byte(&node->values, 0));
        node->values.at[node->length >> 3] |= (uint8_t)(*start << (node->length & 7));
        return close_valid(state, node);
    case AS_STRING:
        if (kind != STRING) break;
        if (!is_utf8(start + 4, (size_t)(stop - start) - 5)) return refuse(state, node, FOUND_NO_TEXT);
        return add_data(state, node, start + 4, (size_t)(stop - start) - 5);
    case AS_OBJECT_ID:
        if (kind != OBJECT_ID) break;
        MUST(put_hex(&node->data, start, 12));
        return close_data(state, node);
    case AS_DATE: {
        if (kind != DATE) break;
        int64_t ms = int64_at(start);
        if (ms > MOST_MS || ms < -MOST_MS) return refuse(state, node, FOUND_INEXACT);
        return add_fixed(state, node, &ms);
    }
    case AS_TIMESTAMP:
        if (kind != TIMESTAMP) break;
        return add_fixed(state, node, start);
    case AS_DECIMAL_TEXT:
    case AS_DECIMAL:
        return take_decimal(state, node, kind, start);
    case AS_BINARY:
    case AS_UUID:
        if (kind != BINARY) break;
        return take_bytes(state, node, start, stop);
    case AS_JSON:
        return close_written(state, node, began, put_value(state, &node->data, kind, start, stop, depth));
    case AS_RAW:
        if (kind != OBJECT) break;
        return add_data(state, node, start, (size_t)(stop - start));
    case AS_STRUCT:
        if (kind != OBJECT) break;
        if (take_fields(state, node, start, stop, depth + 1, NULL) != DONE) return WRONG;
        return close_valid(state, node);
    case AS_LIST:
        if (kind != ARRAY) break;
        return take_list(state, node, start, stop, depth + 1);
    }
    return refuse(state, node, found_bit(kind));
}

/* ------------------------------------------------------------------------------------------------ fields */

static inline uint32_t name_hash(const uint8_t *name, size_t size) {
    uint32_t hash = 2166136261u ^ (uint32_t)size;
    for (size_t place = 0; place < size; place++) hash = (hash ^ name[place]) * 16777619u;
    return hash ^ hash >> 15;
}

/* The first child of this name, or -1. */
static int32_t find_child(const Node *node, const uint8_t *name, size_t size) {
    if (node->slots == 0) return -1;
    for (uint32_t slot = name_hash(name, size) & (node->slots - 1);; slot = (slot + 1) & (node->slots - 1)) {
        int32_t place = node->table[slot];
        if (place < 0) return -1;
        const Node *child = &node->children[place];
        if (child->name_size == size && memcmp(child->name, name, size) == 0) return place;
    }
}

static int take_rest(State *state, Node *root, const Element *element) {
    for (uint32_t place = 0; place < root->count; place++) {
        Node *node = &root->children[place];
        if (node->kind != AS_REST) continue;
        size_t began = node->data.used;
        MUST(put_byte(&node->data, node->open ? ',' : '{'));
        int ended = put_field(state, &node->data, element, 0);
        if (ended == WRONG) return WRONG;
        if (ended == NO_TEXT) {
            node->data.used = began;
            node->bad = 1;
        } else {
            node->open = 1;
        }
    }
    return DONE;
}

/* The fields of the document in [at, end) into the children of *node*; root: it is the document itself. */
static int take_fields(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth, Node *root) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    int64_t row = node->length;
    int32_t expected = 0, count = (int32_t)node->count;
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        int32_t place = -1;
        if (expected < count) {
            const Node *child = &node->children[expected];
            if (end - at > (ptrdiff_t)child->name_size + 1 && child->kind < AS_DOCUMENT &&
                memcmp(at + 1, child->name, (size_t)child->name_size + 1) == 0) {
                element.kind = *at;
                element.name = at + 1;
                element.name_size = child->name_size;
                element.start = at + 2 + child->name_size;
                element.stop = value_end(state, element.kind, element.start, end);
                if (element.stop == NULL) return WRONG;
                place = expected;
            }
        }
        if (place < 0) {
            if (!next_element(state, at, end, &element)) return WRONG;
            place = find_child(node, element.name, element.name_size);
        }
        if (place < 0) {
            if (root != NULL && take_rest(state, root, &element) != DONE) return WRONG;
            continue;
        }
        expected = node->children[place].follow;
        for (; place >= 0; place = node->children[place].same) {
            Node *child = &node->children[place];
            if (child->length == row && take(state, child, element.kind, element.start, element.stop, depth) != DONE)
                return WRONG;
        }
    }
    for (uint32_t place = 0; place < node->count; place++) {
        Node *child = &node->children[place];
        if (child->length > row || child->kind == AS_REST) continue;
        if ((child->required ? refuse(state, child, FOUND_MISSING) : add_null(state, child)) != DONE) return WRONG;
    }
    return DONE;
}

static int take_document(State *state, Node *root, const uint8_t *at, const uint8_t *end) {
    bool rest = false;
    for (uint32_t place = 0; place < root->count; place++) {
        Node *node = &root->children[place];
        size_t began = node->data.used;
        if (node->kind == AS_DOCUMENT) {
            int ended = put_document(state, &node->data, at, end, 0, false);
            if (close_written(state, node, began, ended) != DONE) return WRONG;
        } else if (node->kind == AS_REST) {
            node->began = began;
            node->open = node->bad = 0;
            rest = true;
        }
    }
    if (take_fields(state, root, at, end, 0, rest ? root : NULL) != DONE) return WRONG;
    for (uint32_t place = 0; rest && place < root->count; place++) {
        Node *node = &root->children[place];
        if (node->kind != AS_REST) continue;
        int ended;
        if (node->bad) {
            node->data.used = node->began;
            ended = refuse(state, node, FOUND_NO_TEXT);
        } else if (node->open) {
            MUST(put_byte(&node->data, '}'));
            ended = close_data(state, node);
        } else {
            ended = add_null(state, node);
        }
        if (ended != DONE) return WRONG;
    }
    root->length++;
    return DONE;
}

/* ------------------------------------------------------------------------------------------------ blocks */

/* Memory that a column grew in, as Arrow takes it. */
typedef struct {
    PyObject_HEAD
    void *at;
    Py_ssize_t size;
} Block;

static void block_dealloc(PyObject *self) {
    free(((Block *)self)->at);
    Py_TYPE(self)->tp_free(self);
}

static int block_buffer(PyObject *self, Py_buffer *view, int flags) {
    Block *block = (Block *)self;
    return PyBuffer_FillInfo(view, self, block->at, block->size, 1, flags);
}

static PyBufferProcs block_as_buffer = {.bf_getbuffer = block_buffer};

static PyTypeObject block_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "headwater.sources.mongodb.documents._documents.Block",
    .tp_basicsize = sizeof(Block),
    .tp_dealloc = block_dealloc,
    .tp_as_buffer = &block_as_buffer,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

/* Gives the memory of *bytes* away. */
static PyObject *block_of(Bytes *bytes) {
    Block *block = PyObject_New(Block, &block_type);
    if (block == NULL) return NULL;
    /* the block of nothing has an address, too */
    void *fitted = bytes->room - bytes->used > bytes->room / 8 || bytes->at == NULL
                       ? realloc(bytes->at, bytes->used ? bytes->used : 8)
                       : bytes->at;
    block->at = fitted != NULL ? fitted : bytes->at;
    block->size = (Py_ssize_t)bytes->used;
    memset(bytes, 0, sizeof *bytes);
    if (block->at == NULL) {
        Py_DECREF(block);
        return PyErr_NoMemory();
    }
    return (PyObject *)block;
}

static PyObject *node_made(Node *node) {
    PyObject *valid = NULL, *values = NULL, *data = NULL, *children = PyList_New(node->count), *made = NULL;
    if (children == NULL) return NULL;
    for (uint32_t place = 0; place < node->count; place++) {
        PyObject *child = node_made(&node->children[place]);
        if (child == NULL) goto end;
        PyList_SET_ITEM(children, place, child);
    }
    valid = node->nulls ? block_of(&node->valid) : Py_NewRef(Py_None);
    values = node->kind == AS_STRUCT ? Py_NewRef(Py_None) : block_of(&node->values);
    data = has_data(node) ? block_of(&node->data) : Py_NewRef(Py_None);
    if (valid != NULL && values != NULL && data != NULL)
        made = Py_BuildValue("LLLIOOOO", (long long)node->length, (long long)node->nulls, (long long)node->conflicts,
                             node->found, valid, values, data, children);
end:
    Py_XDECREF(valid);
    Py_XDECREF(values);
    Py_XDECREF(data);
    Py_DECREF(children);
    return made;
}

/* ------------------------------------------------------------------------------------------------ plans */

static void node_clear(Node *node) {
    for (uint32_t place = 0; node->children != NULL && place < node->count; place++) node_clear(&node->children[place]);
    free(node->children);
    free(node->table);
    free(node->name);
    free(node->valid.at);
    free(node->values.at);
    free(node->data.at);
    memset(node, 0, sizeof *node);
}

static void plan_free(PyObject *capsule) {
    Plan *plan = PyCapsule_GetPointer(capsule, "headwater.documents.plan");
    if (plan == NULL) return;
    node_clear(&plan->root);
    free(plan);
}

static uint8_t width_of(const Node *node) {
    switch (node->kind) {
    case AS_INT: return 4;
    case AS_LONG:
    case AS_DOUBLE:
    case AS_DATE:
    case AS_TIMESTAMP: return 8;
    case AS_DECIMAL: return node->digits <= 38 ? 16 : 32;
    default: return 0;
    }
}

/* The table that finds children by name, and which child is expected after each. */
static bool node_index(Node *node) {
    node->slots = 4;
    while (node->slots < 2 * node->count + 2) node->slots *= 2;
    node->table = malloc(node->slots * sizeof *node->table);
    if (node->table == NULL) return false;
    for (uint32_t slot = 0; slot < node->slots; slot++) node->table[slot] = -1;
    for (uint32_t place = 0; place < node->count; place++) {
        Node *child = &node->children[place];
        child->same = -1;
        child->follow = (int32_t)place + 1;
        if (child->kind >= AS_DOCUMENT) continue;
        int32_t first = find_child(node, child->name, child->name_size);
        if (first >= 0) {
            while (node->children[first].same >= 0) first = node->children[first].same;
            node->children[first].same = (int32_t)place;
            continue;
        }
        uint32_t slot = name_hash(child->name, child->name_size) & (node->slots - 1);
        while (node->table[slot] >= 0) slot = (slot + 1) & (node->slots - 1);
        node->table[slot] = (int32_t)place;
    }
    /* a child that shares its name with one before it, or takes no field, is never expected */
    int32_t next = (int32_t)node->count;
    for (int32_t place = (int32_t)node->count - 1; place >= 0; place--) {
        Node *child = &node->children[place];
        child->follow = next;
        if (child->kind < AS_DOCUMENT && find_child(node, child->name, child->name_size) == place) next = place;
    }
    return true;
}

/* (name, kind, digits, scale, required, children) */
static bool node_describe(Node *node, PyObject *described, int depth) {
    const char *name;
    Py_ssize_t size;
    int kind, digits, scale, required;
    PyObject *children;
    if (!PyArg_ParseTuple(described, "y#iiipO!", &name, &size, &kind, &digits, &scale, &required, &PyTuple_Type,
                          &children))
        return false;
    Py_ssize_t count = PyTuple_GET_SIZE(children);
    bool nested = kind == AS_STRUCT || kind == AS_LIST;
    if (kind < 0 || kind >= KINDS || digits < 0 || digits > 76 || scale < 0 || scale > 255 || depth > 64 ||
        size > INT32_MAX || count > MOST_CHILDREN || (count > 0) != nested || (kind == AS_LIST && count != 1) ||
        (kind >= AS_DOCUMENT && depth != 1) || memchr(name, 0, (size_t)size) != NULL) {
        PyErr_SetString(PyExc_TypeError, "a column is of no kind that is known");
        return false;
    }
    node->kind = (uint8_t)kind;
    node->digits = (uint8_t)digits;
    node->scale = (uint8_t)scale;
    node->required = (uint8_t)required;
    node->width = width_of(node);
    node->name_size = (uint32_t)size;
    node->name = malloc((size_t)size + 1);
    node->children = calloc((size_t)count + 1, sizeof(Node));
    if (node->name == NULL || node->children == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(node->name, name, (size_t)size + 1);
    node->count = (uint32_t)count;
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *child = PyTuple_GET_ITEM(children, place);
        if (!PyTuple_Check(child)) {
            PyErr_SetString(PyExc_TypeError, "a column is no tuple");
            return false;
        }
        if (!node_describe(&node->children[place], child, depth + 1)) return false;
    }
    if (!node_index(node)) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

/* plan(columns) -> what decode is given */
static PyObject *make_plan(PyObject *Py_UNUSED(module), PyObject *columns) {
    Plan *plan = calloc(1, sizeof(Plan));
    if (plan == NULL) return PyErr_NoMemory();
    /* a table has a column at least */
    PyObject *root = Py_BuildValue("(yiiiOO)", "", AS_STRUCT, 0, 0, Py_False, columns), *made = NULL;
    if (root != NULL && node_describe(&plan->root, root, 0)) made = PyCapsule_New(plan, "headwater.documents.plan", plan_free);
    Py_XDECREF(root);
    if (made == NULL) {
        node_clear(&plan->root);
        free(plan);
    }
    return made;
}

/* ------------------------------------------------------------------------------------------------ batches */

typedef struct {
    Py_buffer data, offsets, validity;
    bool has_offsets, has_validity;
    Py_ssize_t first, rows;
} Batch;

/* The documents of a batch; *number: the one that was read last. */
static int take_batch(State *state, Node *root, const Batch *batch, Py_ssize_t *number) {
    const uint8_t *start = batch->data.buf, *last = start + batch->data.len;
    *number = 0;
    if (!batch->has_offsets) {
        for (const uint8_t *at = start; at < last; (*number)++) {
            const uint8_t *end = document_end(state, at, last);
            if (end == NULL || take_document(state, root, at, end) != DONE) return WRONG;
            at = end;
        }
        return DONE;
    }
    const uint8_t *offsets = (const uint8_t *)batch->offsets.buf + 4 * batch->first, *valid = batch->validity.buf;
    for (; *number < batch->rows; (*number)++) {
        Py_ssize_t place = batch->first + *number;
        if (batch->has_validity && !(valid[place >> 3] >> (place & 7) & 1)) {
            for (uint32_t child = 0; child < root->count; child++)
                if (add_null(state, &root->children[child]) != DONE) return WRONG;
            root->length++;
            continue;
        }
        int32_t from = int32_at(offsets + 4 * *number), to = int32_at(offsets + 4 * *number + 4);
        if (from < 0 || from > to || to > batch->data.len) return wrong(state, CUT);
        const uint8_t *end = document_end(state, start + from, start + to);
        if (end == NULL) return WRONG;
        if (end != start + to) return wrong(state, ENDLESS);
        if (take_document(state, root, start + from, end) != DONE) return WRONG;
    }
    return DONE;
}

/* decode(plan, data, offsets or None, validity or None, first, rows) -> (rows, [column])
 *
 * data: documents one after another; with offsets: those of a binary Arrow array, of which *rows* elements from *first*
 * on are taken. ValueError: these are no documents. */
static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule, *offsets, *validity, *made = NULL;
    Batch batch = {0};
    if (!PyArg_ParseTuple(args, "Oy*OOnn", &capsule, &batch.data, &offsets, &validity, &batch.first, &batch.rows))
        return NULL;
    Plan *plan = PyCapsule_GetPointer(capsule, "headwater.documents.plan");
    if (plan == NULL) goto end;
    if (plan->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a plan is used by one thread at a time");
        goto end;
    }
    if (offsets != Py_None) {
        if (PyObject_GetBuffer(offsets, &batch.offsets, PyBUF_SIMPLE) < 0) goto end;
        batch.has_offsets = true;
        if (batch.first < 0 || batch.rows < 0 || batch.offsets.len / 4 - 1 - batch.first < batch.rows) {
            PyErr_SetString(PyExc_ValueError, "there are fewer documents than rows");
            goto end;
        }
    }
    if (offsets != Py_None && validity != Py_None) {
        if (PyObject_GetBuffer(validity, &batch.validity, PyBUF_SIMPLE) < 0) goto end;
        batch.has_validity = true;
        if (batch.validity.len < (batch.first + batch.rows + 7) / 8) {
            PyErr_SetString(PyExc_ValueError, "there are fewer documents than rows");
            goto end;
        }
    }
    State state = {0};
    Py_ssize_t number = 0;
    int ended = WRONG;
    plan->busy = true;
    Py_BEGIN_ALLOW_THREADS;
    locale_t before = uselocale(plain_locale);
    if (node_begin(&plan->root)) ended = take_batch(&state, &plan->root, &batch, &number);
    else state.wrong = NO_MEMORY;
    uselocale(before);
    Py_END_ALLOW_THREADS;
    plan->busy = false;
    if (ended != DONE) {
        if (state.wrong == NO_MEMORY) PyErr_NoMemory();
        else PyErr_Format(PyExc_ValueError, "document %zd: %s", number, state.wrong);
        goto end;
    }
    PyObject *columns = PyList_New(plan->root.count);
    for (uint32_t place = 0; columns != NULL && place < plan->root.count; place++) {
        PyObject *column = node_made(&plan->root.children[place]);
        if (column == NULL) Py_CLEAR(columns);
        else PyList_SET_ITEM(columns, place, column);
    }
    if (columns != NULL) made = Py_BuildValue("LN", (long long)plan->root.length, columns);
end:
    if (batch.has_offsets) PyBuffer_Release(&batch.offsets);
    if (batch.has_validity) PyBuffer_Release(&batch.validity);
    PyBuffer_Release(&batch.data);
    return made;
}

static PyMethodDef methods[] = {
    {"plan", make_plan, METH_O, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.mongodb.documents._documents",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__documents(void) {
    plain_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain_locale == (locale_t)0) return PyErr_SetFromErrno(PyExc_OSError);
    if (PyType_Ready(&block_type) < 0) return NULL;
    return PyModule_Create(&module);
}
