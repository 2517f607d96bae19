/* The compiled half of headwater.sources.mysql.binlog: decodes the rows of row events into columns.
 *
 * It does what PythonRows in python_rows.py does, byte for byte, and one test suite runs over both. Rules:
 * - every read is checked against the end of its event; whatever is wrong raises SourceProtocolError;
 * - an event is taken whole or not at all: rows are counted only after the last byte of the event was right;
 * - no Python object per value: columns grow in bytes objects, which Arrow then takes without a copy.
 */
#include "../../_arrow_builders.h"
#include "../_calendar.h"

#define OP_INSERT 1
#define OP_DELETE 2
#define OP_UPDATE_INSERT 3
#define OP_UPDATE_DELETE 4

#define KIND_INSERT 1
#define KIND_UPDATE 2
#define KIND_DELETE 3

/* How a value lies in the event; see row_layout.py. */
enum { FIXED, DECIMAL, BITS, DATE, TIME, DATETIME, TIMESTAMP, TIME2, DATETIME2, TIMESTAMP2, COUNTED, WIRES };
/* What becomes of it. */
enum { SKIP, NUMBER, YEAR, DECIMAL128, DECIMAL256, DECIMAL_TEXT, DAYS, DAYTIME, DURATION, MOMENT, TIME_TEXT, BYTES, PADDED,
       TRANSCODED, JSON, WKB, OUTPUTS };
/* What is known of a value; bit 0 is what Arrow wants. */
enum { IS_NULL = 0, IS_VALUE = 1, IS_MISSING = 2, IS_SPECIAL = 4 };

#define BILLION 1000000000u
#define MAX_DEPTH 100

typedef unsigned __int128 uint128;

static PyObject *protocol_error;

static int fail(const char *reason) { return raise_made(protocol_error, reason); }

/* ------------------------------------------------------------------------------------------------ columns */

typedef struct {
    uint8_t wire, size, scale, output, width;
    bool is_signed, is_text; /* text: offsets and data */
    uint32_t padded;
    Buffer data, offsets, valid;
    Py_ssize_t used; /* bytes of data, of text */
    PyObject *table;
} Column;

typedef struct {
    PyObject_HEAD Py_ssize_t columns;
    Column *column;
    Buffer ops, transactions, seqs;
    Py_ssize_t rows, bytes;
} Decoder;

typedef struct {
    const uint8_t *at, *end;
} Reader;

static inline uint64_t little(const uint8_t *at, int size) {
    uint64_t value = 0;
    for (int place = size - 1; place >= 0; place--) value = value << 8 | at[place];
    return value;
}

static inline uint64_t big(const uint8_t *at, int size) {
    uint64_t value = 0;
    for (int place = 0; place < size; place++) value = value << 8 | at[place];
    return value;
}

/* Room for *more* bytes of text; where they go. */
static inline char *text_room(Column *column, Py_ssize_t more) {
    if (column->used + more > INT32_MAX) {
        fail("the rows of a batch hold more than 2 GiB in one column.");
        return NULL;
    }
    if (buffer_room(&column->data, column->used + more + 1) < 0) return NULL; /* never no room at all: that is NULL */
    return column->data.at + column->used;
}

static inline int text_add(Column *column, const void *text, Py_ssize_t size) {
    char *to = text_room(column, size);
    if (to == NULL) return -1;
    memcpy(to, text, (size_t)size);
    column->used += size;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ decimals */

static const uint8_t DIGIT_BYTES[10] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 4};
static const uint32_t POWERS[10] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000};

static int decimal_size(int precision, int scale) {
    int whole = precision - scale;
    return whole / 9 * 4 + DIGIT_BYTES[whole % 9] + scale / 9 * 4 + DIGIT_BYTES[scale % 9];
}

typedef struct {
    uint32_t group[16];
    uint8_t digits[16];
    int count;
    bool negative;
} Groups;

/* The groups of up to nine digits, most significant first. */
static int decimal_groups(const uint8_t *at, int precision, int scale, Groups *into) {
    uint8_t copy[40];
    int size = decimal_size(precision, scale), whole = precision - scale, place = 0;
    memcpy(copy, at, (size_t)size);
    into->negative = !(copy[0] & 0x80);
    copy[0] ^= 0x80;
    if (into->negative)
        for (int byte = 0; byte < size; byte++) copy[byte] = (uint8_t)~copy[byte];
    into->count = 0;
    int lengths[16], count = 0;
    if (whole % 9) lengths[count++] = whole % 9;
    for (int group = 0; group < whole / 9; group++) lengths[count++] = 9;
    for (int group = 0; group < scale / 9; group++) lengths[count++] = 9;
    if (scale % 9) lengths[count++] = scale % 9;
    for (int group = 0; group < count; group++) {
        uint64_t value = big(copy + place, DIGIT_BYTES[lengths[group]]);
        place += DIGIT_BYTES[lengths[group]];
        if (value >= POWERS[lengths[group]]) return fail("a DECIMAL has digits that are none.");
        into->group[into->count] = (uint32_t)value;
        into->digits[into->count++] = (uint8_t)lengths[group];
    }
    return 0;
}

static void decimal_number(const Groups *groups, uint8_t *to, int words) {
    uint64_t value[4] = {0, 0, 0, 0};
    for (int group = 0; group < groups->count; group++) {
        uint128 carry = groups->group[group];
        for (int word = 0; word < words; word++) {
            carry += (uint128)value[word] * POWERS[groups->digits[group]];
            value[word] = (uint64_t)carry;
            carry >>= 64;
        }
    }
    if (groups->negative) {
        uint64_t carry = 1;
        for (int word = 0; word < words; word++) {
            value[word] = ~value[word] + carry;
            carry = carry && value[word] == 0;
        }
    }
    memcpy(to, value, (size_t)words * 8);
}

/* As the server prints it; at most 70 bytes. */
static int decimal_text(const Groups *groups, int precision, int scale, char *to) {
    char digits[80];
    int count = 0, whole = precision - scale, used = 0;
    bool is_zero = true;
    for (int group = 0; group < groups->count; group++) {
        uint32_t value = groups->group[group];
        is_zero = is_zero && value == 0;
        for (int digit = groups->digits[group] - 1; digit >= 0; digit--) {
            digits[count + digit] = (char)('0' + value % 10);
            value /= 10;
        }
        count += groups->digits[group];
    }
    int first = 0;
    while (first < whole - 1 && digits[first] == '0') first++;
    if (groups->negative && !is_zero) to[used++] = '-';
    if (whole == 0) to[used++] = '0';
    for (; first < whole; first++) to[used++] = digits[first];
    if (scale) {
        to[used++] = '.';
        memcpy(to + used, digits + whole, (size_t)scale);
        used += scale;
    }
    return used;
}

/* ------------------------------------------------------------------------------------------------ dates and times */

typedef struct {
    int year, month, day, hour, minute, second, us;
    bool negative;
} Parts;

static void date_of(int64_t days, Parts *into) {
    days += 719468;
    int64_t era = (days >= 0 ? days : days - 146096) / 146097, of_era = days - era * 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100), month = (5 * of_year + 2) / 153;
    into->day = (int)(of_year - (153 * month + 2) / 5 + 1);
    into->month = (int)(month + (month < 10 ? 3 : -9));
    into->year = (int)(year + era * 400 + (into->month <= 2));
}

static inline int fraction_size(int digits) { return (digits + 1) / 2; }

static inline int fraction_us(const uint8_t *at, int digits) {
    static const int SCALE[4] = {0, 10000, 100, 1};
    int size = fraction_size(digits);
    return (int)big(at, size) * SCALE[size];
}

static int temporal_size(int wire, int digits) {
    switch (wire) {
    case DATE: return 3;
    case TIME: return 3;
    case DATETIME: return 8;
    case TIMESTAMP: return 4;
    case TIME2: return 3 + fraction_size(digits);
    case DATETIME2: return 5 + fraction_size(digits);
    default: return 4 + fraction_size(digits);
    }
}

static void moment_parts(int64_t seconds, Parts *into) {
    if (seconds == 0 && into->us == 0) return; /* the zero date */
    date_of(seconds / 86400, into);
    into->hour = (int)(seconds % 86400 / 3600);
    into->minute = (int)(seconds % 3600 / 60);
    into->second = (int)(seconds % 60);
}

static int temporal_parts(const uint8_t *at, int wire, int digits, Parts *into) {
    memset(into, 0, sizeof *into);
    switch (wire) {
    case DATE: {
        uint32_t value = (uint32_t)little(at, 3);
        into->day = value & 31;
        into->month = value >> 5 & 15;
        into->year = (int)(value >> 9);
        break;
    }
    case DATETIME: {
        uint64_t value = little(at, 8), date = value / 1000000, time = value % 1000000;
        if (date > 99991231) return fail("a DATETIME is none.");
        into->year = (int)(date / 10000);
        into->month = (int)(date / 100 % 100);
        into->day = (int)(date % 100);
        into->hour = (int)(time / 10000);
        into->minute = (int)(time / 100 % 100);
        into->second = (int)(time % 100);
        break;
    }
    case TIME: {
        int32_t value = (int32_t)((uint32_t)little(at, 3) << 8) >> 8;
        into->negative = value < 0;
        if (value < 0) value = -value;
        into->hour = value / 10000;
        into->minute = value / 100 % 100;
        into->second = value % 100;
        break;
    }
    case TIMESTAMP:
        moment_parts((int64_t)little(at, 4), into);
        break;
    case TIMESTAMP2:
        into->us = fraction_us(at + 4, digits);
        moment_parts((int64_t)big(at, 4), into);
        break;
    case DATETIME2: {
        int64_t value = (int64_t)big(at, 5) - INT64_C(0x8000000000);
        if (value < 0) return fail("a DATETIME is none.");
        int64_t date = value >> 17, months = date >> 5;
        into->us = fraction_us(at + 5, digits);
        into->year = (int)(months / 13);
        into->month = (int)(months % 13);
        into->day = (int)(date & 31);
        into->hour = (int)(value >> 12 & 31);
        into->minute = (int)(value >> 6 & 63);
        into->second = (int)(value & 63);
        break;
    }
    default: { /* TIME2: one number, offset by half of its range; its fraction counts from below */
        int size = 3 + fraction_size(digits);
        int64_t value = (int64_t)big(at, size) - (INT64_C(1) << (size * 8 - 1));
        static const int SCALE[4] = {0, 10000, 100, 1};
        into->negative = value < 0;
        if (value < 0) value = -value;
        int bits = (size - 3) * 8;
        into->us = bits ? (int)(value & ((INT64_C(1) << bits) - 1)) * SCALE[size - 3] : 0;
        value >>= bits;
        into->hour = (int)(value >> 12 & 1023);
        into->minute = (int)(value >> 6 & 63);
        into->second = (int)(value & 63);
        break;
    }
    }
    if (into->month > 12 || into->year > 9999 || into->minute > 59 || into->second > 59 || into->us > 999999
        || into->hour > (wire == TIME || wire == TIME2 ? 838 : 23))
        return fail("a date or time is none.");
    return 0;
}

static inline bool is_special(const Parts *parts) {
    return parts->year == 0 || parts->month == 0 || parts->day == 0
           || parts->day > days_in(parts->year, parts->month);
}

static inline int64_t us_of_day(const Parts *parts) {
    return ((parts->hour * INT64_C(60) + parts->minute) * 60 + parts->second) * 1000000 + parts->us;
}

static int put_digits(char *to, int value, int digits) {
    for (int place = digits - 1; place >= 0; place--) {
        to[place] = (char)('0' + value % 10);
        value /= 10;
    }
    return digits;
}

/* As the server prints it; at most 32 bytes. */
static int temporal_text(const Parts *parts, bool has_date, bool has_time, int digits, char *to) {
    int used = 0;
    if (has_date) {
        used += put_digits(to, parts->year, 4);
        to[used++] = '-';
        used += put_digits(to + used, parts->month, 2);
        to[used++] = '-';
        used += put_digits(to + used, parts->day, 2);
    }
    if (!has_time) return used;
    if (has_date) to[used++] = ' ';
    else if (parts->negative) to[used++] = '-';
    used += put_digits(to + used, parts->hour, parts->hour > 99 ? 3 : 2);
    to[used++] = ':';
    used += put_digits(to + used, parts->minute, 2);
    to[used++] = ':';
    used += put_digits(to + used, parts->second, 2);
    if (digits) {
        to[used++] = '.';
        int us = parts->us;
        for (int place = digits; place < 6; place++) us /= 10;
        used += put_digits(to + used, us, digits);
    }
    return used;
}

/* ------------------------------------------------------------------------------------------------ JSON */

/* A document never holds more than its own bytes: what it says of sizes and places is paid for from *budget*, so that
 * bytes that point at each other can neither run forever nor grow. */
typedef struct {
    Column *column;
    Py_ssize_t budget;
} Printer;

static int json_value(Printer *print, int type, const uint8_t *at, Py_ssize_t size, int depth);

static int json_pay(Printer *print, Py_ssize_t bytes) {
    print->budget -= bytes;
    return print->budget < 0 ? fail("a JSON document holds more than its bytes.") : 0;
}

static int json_string(Printer *print, const uint8_t *at, Py_ssize_t size) {
    if (json_pay(print, size) < 0) return -1;
    char *to = text_room(print->column, size * 6 + 2);
    if (to == NULL) return -1;
    char *first = to;
    *to++ = '"';
    for (const uint8_t *end = at + size; at < end; at++) {
        uint8_t byte = *at;
        if (byte >= 0x20 && byte != '"' && byte != '\\') {
            *to++ = (char)byte;
            continue;
        }
        *to++ = '\\';
        switch (byte) {
        case '"': *to++ = '"'; break;
        case '\\': *to++ = '\\'; break;
        case '\b': *to++ = 'b'; break;
        case '\f': *to++ = 'f'; break;
        case '\n': *to++ = 'n'; break;
        case '\r': *to++ = 'r'; break;
        case '\t': *to++ = 't'; break;
        default: {
            static const char HEX[] = "0123456789abcdef";
            memcpy(to, "u00", 3);
            to[3] = HEX[byte >> 4];
            to[4] = HEX[byte & 15];
            to += 5;
        }
        }
    }
    *to++ = '"';
    print->column->used += to - first;
    return 0;
}

/* A length of up to five bytes with seven bits in each; -1 where it is cut off. */
static Py_ssize_t json_length(const uint8_t **at, const uint8_t *end) {
    uint64_t length = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (*at >= end) return -1;
        uint8_t byte = *(*at)++;
        length |= (uint64_t)(byte & 0x7F) << shift;
        if (!(byte & 0x80)) return length > UINT32_MAX ? -1 : (Py_ssize_t)length;
    }
    return -1;
}

static int json_double(Printer *print, double value) {
    if (!(value - value == 0)) return fail("a JSON document has a number that is none.");
    char *made = PyOS_double_to_string(value, 'r', 0, 0, NULL);
    if (made == NULL) return -1;
    /* The digits and where the point is among them. */
    char digits[32], text[400];
    int count = 0, point = -1, exponent = 0, used = 0;
    bool negative = made[0] == '-';
    for (const char *at = made + negative; *at; at++) {
        if (*at == '.') point = count;
        else if (*at == 'e') {
            exponent = atoi(at + 1);
            break;
        } else if (count < 31) digits[count++] = *at;
    }
    PyMem_Free(made);
    if (point < 0) point = count;
    point += exponent;
    int leading = 0;
    while (leading < count - 1 && digits[leading] == '0') leading++;
    memmove(digits, digits + leading, (size_t)(count - leading));
    count -= leading;
    point -= leading;
    while (count > 1 && digits[count - 1] == '0') count--;
    if (digits[0] == '0') point = 1;
    if (negative) text[used++] = '-';
    if (point < -14 || (point > 15 && count <= point)) { /* as the server decides */
        text[used++] = digits[0];
        if (count > 1) {
            text[used++] = '.';
            memcpy(text + used, digits + 1, (size_t)(count - 1));
            used += count - 1;
        }
        used += PyOS_snprintf(text + used, 16, "e%d", point - 1);
    } else if (point <= 0) {
        text[used++] = '0';
        text[used++] = '.';
        for (int zero = point; zero < 0; zero++) text[used++] = '0';
        memcpy(text + used, digits, (size_t)count);
        used += count;
    } else {
        for (int place = 0; place < point; place++) text[used++] = place < count ? digits[place] : '0';
        text[used++] = '.';
        if (count > point) {
            memcpy(text + used, digits + point, (size_t)(count - point));
            used += count - point;
        } else text[used++] = '0';
    }
    return text_add(print->column, text, used);
}

static int json_base64(Printer *print, int type, const uint8_t *at, Py_ssize_t size) {
    static const char LETTERS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char head[40];
    int used = PyOS_snprintf(head, sizeof head, "\"base64:type%d:", type);
    if (text_add(print->column, head, used) < 0) return -1;
    char *to = text_room(print->column, size * 2 + 16), *first = to;
    if (to == NULL) return -1;
    int letters = 0;
    for (Py_ssize_t place = 0; place < size; place += 3) {
        if (letters == 76) {
            *to++ = '\\';
            *to++ = 'n';
            letters = 0;
        }
        uint32_t three = (uint32_t)at[place] << 16;
        if (place + 1 < size) three |= (uint32_t)at[place + 1] << 8;
        if (place + 2 < size) three |= at[place + 2];
        *to++ = LETTERS[three >> 18];
        *to++ = LETTERS[three >> 12 & 63];
        *to++ = place + 1 < size ? LETTERS[three >> 6 & 63] : '=';
        *to++ = place + 2 < size ? LETTERS[three & 63] : '=';
        letters += 4;
    }
    *to++ = '"';
    print->column->used += to - first;
    return 0;
}

/* Values of SQL types inside a document. */
static int json_opaque(Printer *print, const uint8_t *at, Py_ssize_t size) {
    const uint8_t *end = at + size;
    if (size < 2) return fail("a JSON document is cut off.");
    int type = *at++;
    Py_ssize_t length = json_length(&at, end);
    if (length < 0 || length > end - at) return fail("a JSON document is cut off.");
    if (json_pay(print, length + 2) < 0) return -1;
    char text[100];
    int used = 0;
    if (type == 246) {
        if (length < 2 || at[0] < 1 || at[0] > 65 || at[1] > at[0] || length < 2 + decimal_size(at[0], at[1]))
            return fail("a JSON document has a DECIMAL that is none.");
        Groups groups;
        if (decimal_groups(at + 2, at[0], at[1], &groups) < 0) return -1;
        used = decimal_text(&groups, at[0], at[1], text);
        return text_add(print->column, text, used);
    }
    if (type == 7 || type == 10 || type == 11 || type == 12) {
        if (length != 8) return fail("a JSON document has a date or time that is none.");
        int64_t value = (int64_t)little(at, 8);
        Parts parts = {0};
        parts.negative = value < 0;
        if (value < 0) value = value == INT64_MIN ? 0 : -value;
        parts.us = (int)(value & 0xFFFFFF) % 1000000;
        value >>= 24;
        if (type != 11) {
            int64_t date = value >> 17, months = date >> 5;
            parts.day = (int)(date & 31);
            parts.month = (int)(months % 13);
            parts.year = (int)(months / 13 % 10000);
            parts.hour = (int)(value >> 12 & 31);
        } else parts.hour = (int)(value >> 12 & 1023) % 1000;
        parts.minute = (int)(value >> 6 & 63);
        parts.second = (int)(value & 63);
        text[used++] = '"';
        used += temporal_text(&parts, type != 11, type != 10, 6, text + used);
        text[used++] = '"';
        return text_add(print->column, text, used);
    }
    return json_base64(print, type, at, length);
}

static int json_container(Printer *print, bool is_object, int width, const uint8_t *at, Py_ssize_t size, int depth) {
    if (depth >= MAX_DEPTH) return fail("a JSON document is nested too deep.");
    if (size < 2 * width) return fail("a JSON document is cut off.");
    Py_ssize_t count = (Py_ssize_t)little(at, width), whole = (Py_ssize_t)little(at + width, width);
    Py_ssize_t key_entry = is_object ? width + 2 : 0, value_entry = width + 1;
    Py_ssize_t keys = 2 * width, values = keys + count * key_entry;
    if (whole > size || values + count * value_entry > whole) return fail("a JSON document is cut off.");
    if (json_pay(print, 2 * width + count * (key_entry + value_entry)) < 0) return -1;
    if (text_add(print->column, is_object ? "{" : "[", 1) < 0) return -1;
    for (Py_ssize_t place = 0; place < count; place++) {
        if (place && text_add(print->column, ", ", 2) < 0) return -1;
        if (is_object) {
            const uint8_t *entry = at + keys + place * key_entry;
            Py_ssize_t from = (Py_ssize_t)little(entry, width), length = (Py_ssize_t)little(entry + width, 2);
            if (from + length > whole) return fail("a JSON document is cut off.");
            if (json_string(print, at + from, length) < 0 || text_add(print->column, ": ", 2) < 0) return -1;
        }
        const uint8_t *entry = at + values + place * value_entry;
        int type = entry[0];
        if (type == 4 || type == 5 || type == 6 || (width == 4 && (type == 7 || type == 8))) {
            if (json_value(print, type, entry + 1, width, depth + 1) < 0) return -1;
        } else {
            Py_ssize_t from = (Py_ssize_t)little(entry + 1, width);
            if (from >= whole) return fail("a JSON document is cut off.");
            if (json_value(print, type, at + from, whole - from, depth + 1) < 0) return -1;
        }
    }
    return text_add(print->column, is_object ? "}" : "]", 1);
}

static int json_value(Printer *print, int type, const uint8_t *at, Py_ssize_t size, int depth) {
    static const uint8_t SIZES[13] = {0, 0, 0, 0, 1, 2, 2, 4, 4, 8, 8, 8, 1};
    char text[32];
    int used;
    if (type <= 12 && size < SIZES[type]) return fail("a JSON document is cut off.");
    switch (type) {
    case 0: case 1: return json_container(print, true, type ? 4 : 2, at, size, depth);
    case 2: case 3: return json_container(print, false, type == 3 ? 4 : 2, at, size, depth);
    case 4:
        if (at[0] > 2) return fail("a JSON document has a literal that is none.");
        return text_add(print->column, at[0] == 0 ? "null" : at[0] == 1 ? "true" : "false", at[0] == 2 ? 5 : 4);
    case 5: used = PyOS_snprintf(text, sizeof text, "%d", (int)(int16_t)little(at, 2)); break;
    case 6: used = PyOS_snprintf(text, sizeof text, "%u", (unsigned)little(at, 2)); break;
    case 7: used = PyOS_snprintf(text, sizeof text, "%ld", (long)(int32_t)little(at, 4)); break;
    case 8: used = PyOS_snprintf(text, sizeof text, "%lu", (unsigned long)little(at, 4)); break;
    case 9: used = PyOS_snprintf(text, sizeof text, "%lld", (long long)little(at, 8)); break;
    case 10: used = PyOS_snprintf(text, sizeof text, "%llu", (unsigned long long)little(at, 8)); break;
    case 11: {
        double value;
        memcpy(&value, at, 8);
        return json_pay(print, 8) < 0 ? -1 : json_double(print, value);
    }
    case 12: {
        const uint8_t *end = at + size;
        Py_ssize_t length = json_length(&at, end);
        if (length < 0 || length > end - at) return fail("a JSON document is cut off.");
        return json_string(print, at, length);
    }
    case 15: return json_opaque(print, at, size);
    default: return fail("a JSON document has a value of a type that is not known.");
    }
    return text_add(print->column, text, used);
}

static int json_document(Column *column, const uint8_t *at, Py_ssize_t size) {
    if (size == 0) return text_add(column, "null", 4); /* what the server reads from no bytes */
    Printer print = {column, size + 16};
    return json_value(&print, at[0], at + 1, size - 1, 0);
}

/* ------------------------------------------------------------------------------------------------ one value */

static int transcode(Column *column, const uint8_t *at, Py_ssize_t size) {
    const uint8_t *table = (const uint8_t *)PyBytes_AS_STRING(column->table);
    char *to = text_room(column, size * 3), *first = to;
    if (to == NULL) return -1;
    for (Py_ssize_t place = 0; place < size; place++) {
        const uint8_t *entry = table + (size_t)at[place] * 4;
        to[0] = (char)entry[1];
        if (entry[0] > 1) {
            to[1] = (char)entry[2];
            if (entry[0] > 2) to[2] = (char)entry[3];
        }
        to += entry[0];
    }
    column->used += to - first;
    return 0;
}

static int put_bytes(Column *column, const uint8_t *at, Py_ssize_t size) {
    switch (column->output) {
    case TRANSCODED: return transcode(column, at, size);
    case JSON: return json_document(column, at, size);
    case WKB:
        if (size < 4) return fail("a geometry is cut off.");
        return text_add(column, at + 4, size - 4);
    case PADDED: {
        if (size > (Py_ssize_t)column->padded) return fail("a BINARY is longer than its type.");
        char *to = text_room(column, column->padded);
        if (to == NULL) return -1;
        memcpy(to, at, (size_t)size);
        memset(to + size, 0, column->padded - (size_t)size);
        column->used += column->padded;
        return 0;
    }
    default: return text_add(column, at, size);
    }
}

static int put_temporal(Column *column, const uint8_t *at, char *slot, char *valid) {
    Parts parts;
    if (temporal_parts(at, column->wire, column->size, &parts) < 0) return -1;
    int64_t value;
    switch (column->output) {
    case TIME_TEXT: {
        char text[40];
        bool has_date = column->wire != TIME && column->wire != TIME2;
        bool has_digits = column->wire == TIME2 || column->wire == DATETIME2 || column->wire == TIMESTAMP2;
        int used = temporal_text(&parts, has_date, column->wire != DATE, has_digits ? column->size : 0, text);
        return text_add(column, text, used);
    }
    case DAYS: {
        if (is_special(&parts)) break;
        int32_t days = (int32_t)days_of(parts.year, parts.month, parts.day);
        memcpy(slot, &days, 4);
        return 0;
    }
    case DAYTIME:
        value = us_of_day(&parts);
        if (parts.negative || value >= DAY_US) break;
        memcpy(slot, &value, 8);
        return 0;
    case DURATION:
        value = us_of_day(&parts);
        if (parts.negative) value = -value;
        memcpy(slot, &value, 8);
        return 0;
    default:
        if (is_special(&parts)) break;
        value = days_of(parts.year, parts.month, parts.day) * DAY_US + us_of_day(&parts);
        memcpy(slot, &value, 8);
        return 0;
    }
    memset(slot, 0, column->width);
    *valid = IS_SPECIAL;
    return 0;
}

/* Reads one value and puts it into *row*. */
static int put_value(Column *column, Reader *read, Py_ssize_t row) {
    Py_ssize_t size, left = read->end - read->at;
    switch (column->wire) {
    case FIXED: case BITS: size = column->size; break;
    case DECIMAL: size = decimal_size(column->size, column->scale); break;
    case COUNTED:
        if (left < column->size) return fail("a row is cut off.");
        size = (Py_ssize_t)little(read->at, column->size);
        read->at += column->size;
        left -= column->size;
        break;
    default: size = temporal_size(column->wire, column->size);
    }
    if (left < size) return fail("a row is cut off.");
    const uint8_t *at = read->at;
    read->at += size;
    if (column->output == SKIP) return 0;
    column->valid.at[row] = IS_VALUE;
    char *slot = column->data.at + row * column->width;
    switch (column->wire) {
    case FIXED:
        if (column->output == YEAR) {
            int16_t year = (int16_t)(at[0] ? 1900 + at[0] : 0);
            memcpy(slot, &year, 2);
        } else {
            uint64_t value = little(at, column->size);
            if (column->is_signed && column->size < 8 && value >> (column->size * 8 - 1))
                value |= ~UINT64_C(0) << (column->size * 8);
            memcpy(slot, &value, column->width); /* little-endian machines only; see the module's init */
        }
        return 0;
    case BITS:
        if (column->output == BYTES) return text_add(column, at, size);
        uint64_t bits = big(at, column->size);
        memcpy(slot, &bits, column->width);
        return 0;
    case DECIMAL: {
        Groups groups;
        if (decimal_groups(at, column->size, column->scale, &groups) < 0) return -1;
        if (column->output == DECIMAL_TEXT) {
            char text[80];
            return text_add(column, text, decimal_text(&groups, column->size, column->scale, text));
        }
        decimal_number(&groups, (uint8_t *)slot, column->output == DECIMAL128 ? 2 : 4);
        return 0;
    }
    case COUNTED: return put_bytes(column, at, size);
    default: return put_temporal(column, at, slot, column->valid.at + row);
    }
}

static inline void end_value(Column *column, Py_ssize_t row) {
    if (column->is_text) ((int32_t *)column->offsets.at)[row + 1] = (int32_t)column->used;
}

static inline void put_nothing(Column *column, Py_ssize_t row, char why) {
    column->valid.at[row] = why;
    if (!column->is_text) memset(column->data.at + row * column->width, 0, column->width);
}

/* The value of the row before, for an after image that lacks what its before image has. */
static int put_same(Column *column, Py_ssize_t row) {
    column->valid.at[row] = column->valid.at[row - 1];
    if (column->is_text) {
        const int32_t *offsets = (const int32_t *)column->offsets.at;
        Py_ssize_t from = offsets[row - 1], size = offsets[row] - from;
        char *to = text_room(column, size);
        if (to == NULL) return -1;
        memcpy(to, column->data.at + from, (size_t)size);
        column->used += size;
    } else
        memcpy(column->data.at + row * column->width, column->data.at + (row - 1) * column->width, column->width);
    return 0;
}

static inline bool has_bit(const uint8_t *bits, Py_ssize_t place) { return bits[place >> 3] >> (place & 7) & 1; }

/* One image into *row*; *before*: what its before image had, else NULL. */
static int put_image(Decoder *self, Reader *read, const uint8_t *present, const uint8_t *before, Py_ssize_t row) {
    Py_ssize_t here = 0;
    for (Py_ssize_t place = 0; place < self->columns; place++) here += has_bit(present, place);
    const uint8_t *nulls = read->at;
    if (here == 0) return fail("a row has no columns.");
    if (read->end - read->at < (here + 7) / 8) return fail("a row is cut off.");
    read->at += (here + 7) / 8;
    here = 0;
    for (Py_ssize_t place = 0; place < self->columns; place++) {
        Column *column = &self->column[place];
        bool is_skipped = column->output == SKIP;
        if (has_bit(present, place)) {
            if (!has_bit(nulls, here++)) {
                if (put_value(column, read, row) < 0) return -1;
            } else if (!is_skipped) put_nothing(column, row, IS_NULL);
        } else if (is_skipped) continue;
        else if (before != NULL && has_bit(before, place)) {
            if (put_same(column, row) < 0) return -1;
        } else put_nothing(column, row, IS_MISSING);
        if (!is_skipped) end_value(column, row);
    }
    return 0;
}

static int make_room(Decoder *self, Py_ssize_t rows) {
    if (buffer_room(&self->ops, rows) < 0 || buffer_room(&self->transactions, rows * 8) < 0
        || buffer_room(&self->seqs, rows * 4) < 0)
        return -1;
    for (Py_ssize_t place = 0; place < self->columns; place++) {
        Column *column = &self->column[place];
        if (column->output == SKIP) continue;
        if (buffer_room(&column->valid, rows) < 0) return -1;
        if (column->is_text) {
            bool is_first = column->offsets.bytes == NULL;
            if (buffer_room(&column->offsets, (rows + 1) * 4) < 0) return -1;
            if (is_first) memset(column->offsets.at, 0, 4);
        } else if (buffer_room(&column->data, rows * column->width + 8) < 0) return -1;
    }
    return 0;
}

static void put_row(Decoder *self, Py_ssize_t row, char op, uint64_t transaction, uint32_t seq) {
    self->ops.at[row] = op;
    memcpy(self->transactions.at + row * 8, &transaction, 8);
    memcpy(self->seqs.at + row * 4, &seq, 4);
}

static int add_rows(Decoder *self, Reader *read, int kind, const uint8_t *present, const uint8_t *after,
                    uint64_t transaction, uint32_t *seq) {
    Py_ssize_t row = self->rows;
    while (read->at < read->end) {
        if (make_room(self, row + 2) < 0) return -1;
        if (put_image(self, read, present, NULL, row) < 0) return -1;
        char op = kind == KIND_INSERT ? OP_INSERT : kind == KIND_DELETE ? OP_DELETE : OP_UPDATE_DELETE;
        put_row(self, row++, op, transaction, (*seq)++);
        if (kind != KIND_UPDATE) continue;
        if (put_image(self, read, after, present, row) < 0) return -1;
        put_row(self, row++, OP_UPDATE_INSERT, transaction, (*seq)++);
    }
    self->rows = row;
    return 0;
}

/* add(data, start, end, kind, present, present_after, transaction, seq) -> seq */
static PyObject *decoder_add(Decoder *self, PyObject *args) {
    Py_buffer data, present, after;
    Py_ssize_t start, end;
    int kind;
    unsigned long long transaction;
    unsigned int seq;
    if (!PyArg_ParseTuple(args, "y*nniy*y*KI", &data, &start, &end, &kind, &present, &after, &transaction, &seq))
        return NULL;
    PyObject *answer = NULL;
    Py_ssize_t bits = (self->columns + 7) / 8;
    if (start < 0 || end < start || end > data.len) fail("an event is cut off.");
    else if (kind < KIND_INSERT || kind > KIND_DELETE || present.len != bits
             || (kind == KIND_UPDATE && after.len != bits))
        fail("rows have another number of columns than their table.");
    else {
        Reader read = {(const uint8_t *)data.buf + start, (const uint8_t *)data.buf + end};
        if (add_rows(self, &read, kind, present.buf, after.buf, transaction, &seq) == 0) {
            self->bytes += end - start;
            answer = PyLong_FromUnsignedLong(seq);
        } else
            for (Py_ssize_t place = 0; place < self->columns; place++) {
                Column *column = &self->column[place];
                if (column->is_text && column->offsets.at != NULL)
                    column->used = ((int32_t *)column->offsets.at)[self->rows];
            }
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&present);
    PyBuffer_Release(&after);
    return answer;
}

/* (data, offsets or None, validity or None, nulls, missing or None, has special values) */
static PyObject *take_column(Column *column, Py_ssize_t rows) {
    if (column->output == SKIP) Py_RETURN_NONE;
    Py_ssize_t nulls, special = 0, missing = 0;
    const char *valid = column->valid.at;
    for (Py_ssize_t row = 0; row < rows; row++) {
        special += valid[row] == IS_SPECIAL;
        missing += valid[row] == IS_MISSING;
    }
    PyObject *absent = Py_NewRef(Py_None);
    if (missing) {
        Py_SETREF(absent, PyBytes_FromStringAndSize(NULL, rows));
        if (absent == NULL) return NULL;
        for (Py_ssize_t row = 0; row < rows; row++) PyBytes_AS_STRING(absent)[row] = valid[row] == IS_MISSING;
    }
    PyObject *validity = packed(valid, rows, &nulls);
    if (validity == NULL) {
        Py_DECREF(absent);
        return NULL;
    }
    PyObject *offsets = column->is_text ? buffer_take(&column->offsets, (rows + 1) * 4) : Py_NewRef(Py_None);
    PyObject *data = buffer_take(&column->data, column->is_text ? column->used : rows * column->width);
    column->used = 0;
    buffer_clear(&column->valid);
    return Py_BuildValue("NNNnNO", data, offsets, validity, nulls, absent, special ? Py_True : Py_False);
}

/* take_buffers() -> (rows, ops, transactions, seqs, columns) */
static PyObject *decoder_take(Decoder *self, PyObject *Py_UNUSED(ignored)) {
    Py_ssize_t rows = self->rows;
    if (make_room(self, rows + 1) < 0) return NULL;
    PyObject *columns = PyList_New(self->columns);
    if (columns == NULL) return NULL;
    self->rows = self->bytes = 0;
    for (Py_ssize_t place = 0; place < self->columns; place++) {
        PyObject *column = take_column(&self->column[place], rows);
        if (column == NULL) {
            Py_DECREF(columns);
            return NULL;
        }
        PyList_SET_ITEM(columns, place, column);
    }
    return Py_BuildValue("nNNNN", rows, buffer_take(&self->ops, rows), buffer_take(&self->transactions, rows * 8),
                         buffer_take(&self->seqs, rows * 4), columns);
}

/* ------------------------------------------------------------------------------------------------ the type */

static void free_columns(Decoder *self) {
    for (Py_ssize_t place = 0; place < self->columns; place++) {
        Column *column = &self->column[place];
        buffer_clear(&column->data);
        buffer_clear(&column->offsets);
        buffer_clear(&column->valid);
        Py_CLEAR(column->table);
    }
    PyMem_Free(self->column);
    self->column = NULL;
    self->columns = 0;
}

static int parse_column(PyObject *tuple, Column *column) {
    int wire, size, scale, output, width, is_signed;
    unsigned int padded;
    PyObject *table;
    if (!PyArg_ParseTuple(tuple, "iiiiipIO", &wire, &size, &scale, &output, &width, &is_signed, &padded, &table))
        return -1;
    bool fits = wire >= 0 && wire < WIRES && output >= 0 && output < OUTPUTS && size >= 0 && size <= 65 && scale >= 0
                && scale <= size + 6 && width >= 0 && width <= 32;
    if (wire == FIXED || wire == BITS) fits = fits && size >= 1 && size <= 8 && (output != YEAR || width == 2) && width <= 8;
    if (wire == DECIMAL) fits = fits && size >= 1 && scale <= size;
    if (wire == COUNTED) fits = fits && size >= 1 && size <= 4;
    if (wire >= DATE && wire <= TIMESTAMP2) fits = fits && size <= 6;
    if (output == TRANSCODED) fits = fits && PyBytes_Check(table) && PyBytes_GET_SIZE(table) == 1024;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a column's layout is none");
        return -1;
    }
    column->wire = (uint8_t)wire;
    column->size = (uint8_t)size;
    column->scale = (uint8_t)scale;
    column->output = (uint8_t)output;
    column->width = (uint8_t)width;
    column->is_signed = is_signed;
    column->is_text = width == 0 && output != SKIP;
    column->padded = padded;
    column->table = Py_NewRef(table);
    return 0;
}

static int decoder_init(Decoder *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *layouts;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &layouts)) return -1;
    free_columns(self);
    Py_ssize_t columns = PyList_GET_SIZE(layouts);
    self->column = PyMem_Calloc((size_t)columns + 1, sizeof(Column));
    if (self->column == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->columns = columns;
    for (Py_ssize_t place = 0; place < columns; place++)
        if (parse_column(PyList_GET_ITEM(layouts, place), &self->column[place]) < 0) return -1;
    return 0;
}

static void decoder_dealloc(Decoder *self) {
    free_columns(self);
    buffer_clear(&self->ops);
    buffer_clear(&self->transactions);
    buffer_clear(&self->seqs);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *get_rows(Decoder *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->rows); }
static PyObject *get_bytes(Decoder *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->bytes); }

static PyMethodDef decoder_methods[] = {
    {"add", (PyCFunction)decoder_add, METH_VARARGS, NULL},
    {"take_buffers", (PyCFunction)decoder_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef decoder_values[] = {
    {"held_rows", (getter)get_rows, NULL, NULL, NULL},
    {"held_bytes", (getter)get_bytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject DecoderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "headwater.sources.mysql.binlog._row_decoder.Decoder",
    .tp_basicsize = sizeof(Decoder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)decoder_init,
    .tp_dealloc = (destructor)decoder_dealloc,
    .tp_methods = decoder_methods,
    .tp_getset = decoder_values,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.mysql.binlog._row_decoder",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__row_decoder(void) {
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "this machine is not little-endian");
        return NULL;
    }
    PyObject *cursor = PyImport_ImportModule("headwater.sources.mysql.binlog.cursor");
    if (cursor == NULL) return NULL;
    protocol_error = PyObject_GetAttrString(cursor, "protocol_error");
    Py_DECREF(cursor);
    if (protocol_error == NULL || PyType_Ready(&DecoderType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddObjectRef(made, "Decoder", (PyObject *)&DecoderType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
