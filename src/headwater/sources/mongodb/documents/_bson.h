/* Bytes that grow, and the elements of raw BSON documents; elements.py is the same in Python.
 *
 * Every read is checked against the end of what holds it; whatever is wrong is left in State.
 */
#ifndef HEADWATER_BSON_H
#define HEADWATER_BSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Types of BSON. */
enum {
    DOUBLE = 1, STRING, OBJECT, ARRAY, BINARY, UNDEFINED, OBJECT_ID, BOOL, DATE, NULL_VALUE, REGEX, DB_POINTER, CODE,
    SYMBOL, CODE_WITH_SCOPE, INT, TIMESTAMP, LONG, DECIMAL, MAX_KEY = 127, MIN_KEY = 255
};

#define MOST_NESTED 220

/* How writing a value ended. */
enum { DONE, WRONG, NO_TEXT };

static const char *const CUT = "a document is cut";
static const char *const VALUE_CUT = "a value is cut";
static const char *const TEXT_CUT = "a text is cut";
static const char *const ENDLESS = "a document does not end where it says";
static const char *const TOO_DEEP = "a document is nested deeper than 220 levels";
static const char *const NO_MEMORY = "no memory";

/* Why nothing more can be read. */
typedef struct {
    const char *wrong;
} State;

static inline int wrong(State *state, const char *reason) {
    state->wrong = reason;
    return WRONG;
}

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) return wrong(state, NO_MEMORY);                                                              \
    } while (0)

typedef struct {
    uint8_t *at;
    size_t used, room, hint; /* hint: what was used the time before */
} Bytes;

static bool bytes_grow(Bytes *bytes, size_t more) {
    size_t wanted = bytes->used + more, room = bytes->room ? bytes->room : bytes->hint + 256;
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
    if (size) memcpy(bytes->at + bytes->used, from, size); /* the room of nothing may have no address */
    bytes->used += size;
    return true;
}

static inline bool put_byte(Bytes *bytes, uint8_t byte) {
    if (!bytes_room(bytes, 1)) return false;
    bytes->at[bytes->used++] = byte;
    return true;
}

#define PUT_TEXT(bytes, text) put(bytes, text, sizeof(text) - 1)

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

#endif
