/* Decodes rows of COPY … (FORMAT binary) into the buffers of Arrow columns; headwater.sources.postgres.binary tells how.
 *
 * A block is read twice: first every length is checked and the room that each column needs is counted, then, without
 * the interpreter's lock, the values are written into buffers of just that size. No Python object per value.
 */
#include "../_arrow_builders.h"
#include <endian.h>

enum {
    BYTES, JSONB, UUID, NUMERIC, /* text and bytes */
    BOOL, INT16, INT32, INT64, OID, FLOAT32, FLOAT64, DATE, TIME, TIMESTAMP, DECIMAL, KINDS
};

/* What a value takes in the copy (-1: as many as it has), and in the column (0: offsets and data; bits for BOOL). */
static const int8_t SENT[KINDS] = {-1, -1, 16, -1, 1, 2, 4, 8, 4, 4, 8, 4, 8, 8, -1};
static const int8_t WIDTH[KINDS] = {0, 0, 0, 0, 0, 2, 4, 8, 8, 4, 8, 4, 8, 8, 16};

#define SEEN_INFINITE 1 /* an infinite date or time; NaN or an infinity of a decimal; the end of a day */
#define SEEN_FAR 2      /* a date or time outside the years 1 to 9999 */
#define SEEN_UNFIT 4    /* no value of the type */

#define EPOCH_DAYS 10957
#define FIRST_DAY (-719162)
#define LAST_DAY 2932896
#define DAY_US INT64_C(86400000000)
#define EPOCH_US INT64_C(946684800000000)
#define FIRST_US INT64_C(-62135596800000000)
#define LAST_US INT64_C(253402300799999999)

#define UUID_TEXT 36
#define NUMERIC_HEADER 8
#define NUMERIC_POSITIVE 0x0000
#define NUMERIC_NEGATIVE 0x4000
#define NUMERIC_NAN 0xC000
#define NUMERIC_INFINITY 0xD000
#define NUMERIC_MINUS_INFINITY 0xF000
#define NUMERIC_MOST_SCALE 0x3FFF
#define MOST_DIGITS 38

static const uint8_t SIGNATURE[11] = {'P', 'G', 'C', 'O', 'P', 'Y', '\n', 0xFF, '\r', '\n', 0};

typedef unsigned __int128 uint128;

typedef struct {
    uint8_t kind, digits, scale;
    Built out;
} Column;

static inline uint16_t read16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return be16toh(value);
}

static inline uint32_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return be32toh(value);
}

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return be64toh(value);
}

/* ------------------------------------------------------------------------------------------------ lengths */

static const char *special_number(int sign) {
    return sign == NUMERIC_NAN ? "NaN"
           : sign == NUMERIC_INFINITY ? "Infinity"
           : sign == NUMERIC_MINUS_INFINITY ? "-Infinity"
                                            : NULL;
}

/* How long the text of a number is, whose length was checked; -1: it is none. */
static int32_t number_length(const uint8_t *at) {
    int groups = read16(at), weight = (int16_t)read16(at + 2), sign = read16(at + 4), scale = read16(at + 6);
    if (special_number(sign) != NULL) return (int32_t)strlen(special_number(sign));
    if ((sign != NUMERIC_POSITIVE && sign != NUMERIC_NEGATIVE) || scale > NUMERIC_MOST_SCALE) return -1;
    for (int place = 0; place < groups; place++)
        if (read16(at + NUMERIC_HEADER + 2 * place) > 9999) return -1;
    int first = groups > 0 && weight >= 0 ? read16(at + NUMERIC_HEADER) : 0;
    int digits = first > 999 ? 4 : first > 99 ? 3 : first > 9 ? 2 : 1;
    return (sign == NUMERIC_NEGATIVE) + digits + (weight > 0 ? 4 * weight : 0) + (scale > 0 ? scale + 1 : 0);
}

/* Why a value of *length* bytes is none of the kind, or NULL; counts the room that it needs. */
static inline const char *measure_value(Column *column, const uint8_t *at, int32_t length) {
    uint8_t kind = column->kind;
    if (SENT[kind] >= 0 && length != SENT[kind]) return "a value has another length than its type";
    switch (kind) {
    case BYTES:
        column->out.size += length;
        break;
    case JSONB:
        if (length < 1 || *at != 1) return "a jsonb value has an unknown version";
        column->out.size += length - 1;
        break;
    case UUID:
        column->out.size += UUID_TEXT;
        break;
    case NUMERIC:
    case DECIMAL:
        if (length < NUMERIC_HEADER || length != NUMERIC_HEADER + 2 * (int32_t)read16(at))
            return "a numeric value has another length than it says";
        if (kind == NUMERIC) {
            int32_t text = number_length(at);
            if (text < 0) return "a numeric value is none";
            column->out.size += text;
        }
        break;
    }
    return NULL;
}

/* Why the block is no copy of these columns, or NULL. *from* is set to the first row. */
static const char *measure(const uint8_t **from, const uint8_t *end, Column *columns, Py_ssize_t count,
                           Py_ssize_t *rows) {
    const uint8_t *at = *from;
    if (end - at >= (Py_ssize_t)sizeof(SIGNATURE) && memcmp(at, SIGNATURE, sizeof(SIGNATURE)) == 0) {
        at += sizeof(SIGNATURE);
        if (end - at < 8) return "its header is cut";
        uint32_t flags = read32(at), extension = read32(at + 4);
        at += 8;
        if (flags != 0 || extension > (size_t)(end - at)) return "its header is unknown";
        at += extension;
    }
    *from = at;
    while (at < end) {
        if (end - at < 2) return "a row is cut";
        int16_t fields = (int16_t)read16(at);
        at += 2;
        if (fields == -1) return at == end ? NULL : "something follows its end";
        if (fields != count) return "a row has another number of values";
        for (Py_ssize_t place = 0; place < count; place++) {
            if (end - at < 4) return "a row is cut";
            int32_t length = (int32_t)read32(at);
            at += 4;
            if (length == -1) continue;
            if (length < 0 || length > end - at) return "a value is cut";
            const char *wrong = measure_value(&columns[place], at, length);
            if (wrong != NULL) return wrong;
            at += length;
        }
        ++*rows;
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------------ values */

/* Up to 64 bytes in moves of a fixed size, which write over what the next value overwrites; more in a call. */
static inline void copy(char *to, const uint8_t *from, int32_t length, const char *to_end, const uint8_t *from_end) {
    if (length <= 16 && to_end - to >= 16 && from_end - from >= 16) memcpy(to, from, 16);
    else if (length <= 64 && to_end - to >= 64 && from_end - from >= 64) memcpy(to, from, 64);
    else memcpy(to, from, (size_t)length);
}

static inline void write_uuid(char *to, const uint8_t *from) {
    static const char HEX[] = "0123456789abcdef";
    for (int place = 0; place < 16; place++) {
        if (place == 4 || place == 6 || place == 8 || place == 10) *to++ = '-';
        *to++ = HEX[from[place] >> 4];
        *to++ = HEX[from[place] & 15];
    }
}

static inline char *write_group(char *to, int group, int digits) {
    for (int place = digits - 1; place >= 0; place--) {
        to[place] = (char)('0' + group % 10);
        group /= 10;
    }
    return to + digits;
}

/* The text of a number, as long as number_length says. */
static void write_number(char *to, const uint8_t *at, int32_t length) {
    int groups = read16(at), weight = (int16_t)read16(at + 2), sign = read16(at + 4), scale = read16(at + 6);
    if (special_number(sign) != NULL) {
        memcpy(to, special_number(sign), (size_t)length);
        return;
    }
    const char *end = to + length;
    at += NUMERIC_HEADER;
    if (sign == NUMERIC_NEGATIVE) *to++ = '-';
    int whole = (int)(end - to) - (scale > 0 ? scale + 1 : 0) - (weight > 0 ? 4 * weight : 0);
    to = write_group(to, weight >= 0 && groups > 0 ? read16(at) : 0, whole);
    for (int place = 1; place <= weight; place++) to = write_group(to, place < groups ? read16(at + 2 * place) : 0, 4);
    if (scale == 0) return;
    *to++ = '.';
    for (int place = weight + 1; scale > 0; place++, scale -= 4) {
        int group = place >= 0 && place < groups ? read16(at + 2 * place) : 0;
        for (int cut = scale; cut < 4; cut++) group /= 10;
        to = write_group(to, group, scale < 4 ? scale : 4);
    }
}

static uint128 powers[MOST_DIGITS + 1];

/* The digits as a whole number of *scale* decimal places; false where it has more digits than the type. */
static bool read_digits(const uint8_t *at, int groups, int weight, int scale, int digits, uint128 *number) {
    while (groups > 0 && read16(at + 2 * (groups - 1)) == 0) groups--;
    *number = 0;
    if (groups == 0) return true;
    int shift = (weight - groups + 1) * 4 + scale; /* of the last group */
    if (shift <= -4 || shift > MOST_DIGITS) return false;
    int last = read16(at + 2 * (groups - 1)), cut = shift < 0 ? -shift : 0;
    for (int place = 0; place < groups; place++)
        if (read16(at + 2 * place) > 9999) return false;
    if (last % (int)powers[cut] != 0) return false;
    uint128 made;
    if (groups <= 4) {
        uint64_t few = 0;
        for (int place = 0; place < groups - 1; place++) few = few * 10000 + read16(at + 2 * place);
        made = few * (uint64_t)powers[4 - cut] + (uint64_t)(last / (int)powers[cut]);
    } else {
        made = 0;
        for (int place = 0; place < groups - 1; place++) {
            if (made > powers[MOST_DIGITS - 4]) return false;
            made = made * 10000 + read16(at + 2 * place);
        }
        if (made > powers[MOST_DIGITS - 4 + cut]) return false;
        made = made * powers[4 - cut] + (uint128)(last / (int)powers[cut]);
    }
    if (shift > 0) {
        if (made >= powers[MOST_DIGITS - shift]) return false;
        made *= powers[shift];
    }
    *number = made;
    return made < powers[digits];
}

static uint8_t read_decimal(const Column *column, const uint8_t *at, uint128 *number) {
    int groups = read16(at), weight = (int16_t)read16(at + 2), sign = read16(at + 4);
    if (sign == NUMERIC_NAN || sign == NUMERIC_INFINITY || sign == NUMERIC_MINUS_INFINITY) return SEEN_INFINITE;
    if (sign != NUMERIC_POSITIVE && sign != NUMERIC_NEGATIVE) return SEEN_UNFIT;
    if (!read_digits(at + NUMERIC_HEADER, groups, weight, column->scale, column->digits, number)) return SEEN_UNFIT;
    if (sign == NUMERIC_NEGATIVE) *number = -*number;
    return 0;
}

/* Writes the value of a row; what it is when Arrow has no such value, else 0. */
static inline uint8_t write_value(Column *column, Py_ssize_t row, const uint8_t *at, int32_t length,
                                  const uint8_t *end) {
    uint8_t *to = column->out.to + row * WIDTH[column->kind];
    switch (column->kind) {
    case JSONB:
        at++;
        length--;
        /* fall through */
    case BYTES:
        copy(column->out.text + column->out.used, at, length, column->out.text + column->out.size, end);
        column->out.used += length;
        return 0;
    case UUID:
        write_uuid(column->out.text + column->out.used, at);
        column->out.used += UUID_TEXT;
        return 0;
    case NUMERIC: {
        int32_t text = number_length(at);
        write_number(column->out.text + column->out.used, at, text);
        column->out.used += text;
        return 0;
    }
    case BOOL:
        if (*at > 1) return SEEN_UNFIT;
        column->out.to[row >> 3] |= (uint8_t)(*at << (row & 7));
        return 0;
    case INT16: {
        uint16_t value = read16(at);
        memcpy(to, &value, 2);
        return 0;
    }
    case INT32: {
        uint32_t value = read32(at);
        memcpy(to, &value, 4);
        return 0;
    }
    case INT64: {
        uint64_t value = read64(at);
        memcpy(to, &value, 8);
        return 0;
    }
    case OID: {
        uint64_t value = read32(at);
        memcpy(to, &value, 8);
        return 0;
    }
    case FLOAT32: {
        uint32_t value = read32(at);
        if ((value & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000)) value = UINT32_C(0x7FC00000); /* the one NaN */
        memcpy(to, &value, 4);
        return 0;
    }
    case FLOAT64: {
        uint64_t value = read64(at);
        if ((value & INT64_MAX) > UINT64_C(0x7FF0000000000000)) value = UINT64_C(0x7FF8000000000000);
        memcpy(to, &value, 8);
        return 0;
    }
    case DATE: {
        int32_t value = (int32_t)read32(at);
        if (value == INT32_MAX || value == INT32_MIN) return SEEN_INFINITE;
        if (value < FIRST_DAY - EPOCH_DAYS || value > LAST_DAY - EPOCH_DAYS) return SEEN_FAR;
        value += EPOCH_DAYS;
        memcpy(to, &value, 4);
        return 0;
    }
    case TIME: {
        int64_t value = (int64_t)read64(at);
        if (value == DAY_US) return SEEN_INFINITE;
        if (value < 0 || value > DAY_US) return SEEN_UNFIT;
        memcpy(to, &value, 8);
        return 0;
    }
    case TIMESTAMP: {
        int64_t value = (int64_t)read64(at);
        if (value == INT64_MAX || value == INT64_MIN) return SEEN_INFINITE;
        if (value < FIRST_US - EPOCH_US || value > LAST_US - EPOCH_US) return SEEN_FAR;
        value += EPOCH_US;
        memcpy(to, &value, 8);
        return 0;
    }
    default: {
        uint128 value;
        uint8_t seen = read_decimal(column, at, &value);
        if (seen == 0) memcpy(to, &value, 16);
        return seen;
    }
    }
}

static void write_rows(const uint8_t *at, const uint8_t *end, Column *columns, Py_ssize_t count, Py_ssize_t rows) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        at += 2;
        for (Py_ssize_t place = 0; place < count; place++) {
            Column *column = &columns[place];
            int32_t length = (int32_t)read32(at);
            at += 4;
            uint8_t seen = 0;
            if (length >= 0) {
                seen = write_value(column, row, at, length, end);
                at += length;
            }
            if (length < 0 || seen) {
                column->out.seen |= seen;
                column->out.nulls++;
                column->out.valid[row >> 3] &= (uint8_t)~(1u << (row & 7));
                memset(column->out.to + row * WIDTH[column->kind], 0, (size_t)WIDTH[column->kind]);
            }
            if (column->out.text != NULL) memcpy(column->out.to + (row + 1) * 4, &column->out.used, 4);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ the function */

static int width_of(const Column *column) {
    return column->kind <= NUMERIC ? TEXT_WIDTH : column->kind == BOOL ? BIT_WIDTH : WIDTH[column->kind];
}

/* decode(block, columns, allocate) -> (rows, [(validity or None, values or offsets, data or None, nulls, seen)])
 *
 * columns: three bytes for each: kind, digits, scale. allocate(size): a writable buffer. ValueError: the block is none. */
static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *block, *described, *allocate, *made = NULL;
    if (!PyArg_ParseTuple(args, "SSO", &block, &described, &allocate)) return NULL;
    Py_ssize_t count = PyBytes_GET_SIZE(described) / 3, rows = 0;
    const uint8_t *description = (const uint8_t *)PyBytes_AS_STRING(described);
    Column *columns = PyMem_Calloc((size_t)count + 1, sizeof(Column));
    if (columns == NULL) return PyErr_NoMemory();
    for (Py_ssize_t place = 0; place < count; place++) {
        Column *column = &columns[place];
        column->kind = description[3 * place];
        column->digits = description[3 * place + 1];
        column->scale = description[3 * place + 2];
        if (column->kind >= KINDS || column->digits > MOST_DIGITS || column->scale > MOST_DIGITS) {
            PyErr_SetString(PyExc_TypeError, "a column is of no kind that is known");
            goto end;
        }
    }
    const uint8_t *from = (const uint8_t *)PyBytes_AS_STRING(block), *end = from + PyBytes_GET_SIZE(block);
    const char *wrong = NULL;
    Py_BEGIN_ALLOW_THREADS;
    wrong = measure(&from, end, columns, count, &rows);
    Py_END_ALLOW_THREADS;
    for (Py_ssize_t place = 0; place < count && wrong == NULL; place++)
        if (columns[place].out.size >= INT32_MAX) wrong = "a column has more than 2 GiB";
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        goto end;
    }
    for (Py_ssize_t place = 0; place < count; place++)
        if (!built_room(&columns[place].out, rows, width_of(&columns[place]), allocate)) goto end;
    Py_BEGIN_ALLOW_THREADS;
    write_rows(from, end, columns, count, rows);
    Py_END_ALLOW_THREADS;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t place = 0; list != NULL && place < count; place++) {
        PyObject *column = built_made(&columns[place].out);
        if (column == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, place, column);
    }
    if (list != NULL) made = Py_BuildValue("nN", rows, list);
end:
    for (Py_ssize_t place = 0; place < count; place++) built_clear(&columns[place].out);
    PyMem_Free(columns);
    return made;
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.postgres._binary",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__binary(void) {
    powers[0] = 1;
    for (int place = 1; place <= MOST_DIGITS; place++) powers[place] = powers[place - 1] * 10;
    return PyModule_Create(&module);
}
