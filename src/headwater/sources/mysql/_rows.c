/* Decodes rows of a prepared statement's result (the binary protocol of MySQL) into the buffers of Arrow columns;
 * headwater.sources.mysql.row_format tells how.
 *
 * A block of packets is read twice: first every length is checked and the room that each column needs is counted, then
 * the values are written into buffers of just that size; both without the interpreter's lock. No Python object per
 * value.
 */
#include "../_arrow_builders.h"
#include "_calendar.h"

/* How a value is sent. */
enum { INT1, INT2, INT4, INT8, REAL4, REAL8, DATETIME, TIME, COUNTED, WIRES };
/* What it becomes. */
enum { SIGNED, UNSIGNED, REAL, DATE, TIMESTAMP, DAYTIME, DURATION, DECIMAL, BOOL, BYTES, KINDS };

static const uint8_t SENT[WIRES] = {1, 2, 4, 8, 4, 8, 0, 0, 0};

#define SEEN_ZERO 1  /* a date or time that no calendar has: a month or day of zero */
#define SEEN_FAR 2   /* a time of day before midnight or after the day's end */
#define SEEN_UNFIT 4 /* no value of the type */
#define SEEN_ODD 8   /* another number than 0 and 1 in a boolean */

#define MOST_PACKET 0xFFFFFF

/* Why decoding stopped. */
enum { MORE, LAST, LONG };

typedef unsigned __int128 uint128;

typedef struct {
    uint8_t wire, kind, width, scale; /* width: bytes of a value in the column; 0: offsets and data, or bits */
    Built out;
} Column;

typedef struct {
    const uint8_t *data;
    uint64_t length;
} Value;

static inline uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

/* Takes the next value of *wire* from *at*; false: the row ends before it does. */
static inline bool take(uint8_t wire, const uint8_t **at, const uint8_t *end, Value *value) {
    const uint8_t *from = *at;
    uint64_t length = SENT[wire];
    if (length == 0) {
        if (from >= end) return false;
        length = *from++;
        if (wire == COUNTED && length > 250) {
            int bytes = length == 252 ? 2 : length == 253 ? 3 : length == 254 ? 8 : 0;
            if (bytes == 0 || end - from < bytes) return false;
            length = little(from, bytes);
            from += bytes;
        }
    }
    if ((uint64_t)(end - from) < length) return false;
    value->data = from;
    value->length = length;
    *at = from + length;
    return true;
}

static inline bool is_null(const uint8_t *row, Py_ssize_t place) {
    return (row[1 + ((place + 2) >> 3)] >> ((place + 2) & 7)) & 1;
}

/* Why a row is none of these columns, or NULL; counts the room that it needs. */
static const char *measure_row(const uint8_t *row, const uint8_t *end, Column *columns, Py_ssize_t count) {
    const uint8_t *at = row + 1 + (count + 9) / 8;
    if (at > end) return "a row is cut";
    for (Py_ssize_t place = 0; place < count; place++) {
        if (is_null(row, place)) continue;
        Value value;
        if (!take(columns[place].wire, &at, end, &value)) return "a row is cut";
        if (columns[place].kind == BYTES) columns[place].out.size += (int64_t)value.length;
    }
    return at == end ? NULL : "a row is longer than its columns";
}

/* ------------------------------------------------------------------------------------------------ values */

/* 0, or why it is none; *us: since 1970. */
static uint8_t read_datetime(const Value *value, int64_t *us) {
    const uint8_t *at = value->data;
    if (value->length == 0) return SEEN_ZERO;
    if (value->length != 4 && value->length != 7 && value->length != 11) return SEEN_UNFIT;
    int year = (int)little(at, 2), month = at[2], day = at[3];
    if (month == 0 || day == 0 || year == 0) return SEEN_ZERO;
    if (month > 12 || year > 9999) return SEEN_UNFIT;
    if (day > days_in(year, month)) return SEEN_ZERO; /* ALLOW_INVALID_DATES */
    int64_t found = days_of(year, month, day) * DAY_US;
    if (value->length >= 7) found += ((at[4] * 60 + at[5]) * 60 + at[6]) * INT64_C(1000000);
    if (value->length == 11) found += (int64_t)little(at + 7, 4);
    *us = found;
    return 0;
}

static uint8_t read_time(const Value *value, int64_t *us) {
    const uint8_t *at = value->data;
    *us = 0;
    if (value->length == 0) return 0;
    if (value->length != 8 && value->length != 12) return SEEN_UNFIT;
    int64_t found = (int64_t)little(at + 1, 4) * DAY_US + ((at[5] * 60 + at[6]) * 60 + at[7]) * INT64_C(1000000);
    if (value->length == 12) found += (int64_t)little(at + 8, 4);
    *us = at[0] ? -found : found;
    return 0;
}

/* A decimal text as a whole number of units of its scale, in four words, least first. */
static uint8_t read_decimal(const Column *column, const Value *value, uint64_t *words) {
    const uint8_t *at = value->data, *end = at + value->length;
    bool minus = at < end && *at == '-';
    if (minus || (at < end && *at == '+')) at++;
    int missing = column->scale, digits = 0;
    bool fraction = false;
    int words_used = column->width / 8;
    memset(words, 0, 32);
    for (; at <= end; at++) {
        int digit;
        if (at == end) {
            if (missing == 0) break;
            digit = 0, missing--, at--;
        } else if (*at == '.' && !fraction) {
            fraction = true;
            continue;
        } else if (*at < '0' || *at > '9') {
            return SEEN_UNFIT;
        } else {
            digit = *at - '0';
            digits++;
            if (fraction && missing-- == 0) return SEEN_UNFIT;
        }
        uint128 carry = (uint128)digit;
        for (int word = 0; word < words_used; word++) {
            carry += (uint128)words[word] * 10;
            words[word] = (uint64_t)carry;
            carry >>= 64;
        }
        if (carry) return SEEN_UNFIT;
    }
    if (digits == 0) return SEEN_UNFIT;
    if (minus) {
        uint64_t carry = 1;
        for (int word = 0; word < words_used; word++) {
            words[word] = ~words[word] + carry;
            carry = carry && words[word] == 0;
        }
    }
    return 0;
}

static uint8_t write_value(Column *column, Py_ssize_t row, const Value *value) {
    uint8_t *to = column->out.to + row * column->width;
    int64_t us = 0;
    uint8_t seen;
    switch (column->kind) {
    case SIGNED: {
        int bits = 64 - 8 * (int)value->length;
        int64_t number = (int64_t)(little(value->data, (int)value->length) << bits) >> bits;
        memcpy(to, &number, column->width);
        return 0;
    }
    case UNSIGNED: {
        uint64_t number = little(value->data, (int)value->length);
        memcpy(to, &number, column->width);
        return 0;
    }
    case REAL:
        if (column->width == value->length) memcpy(to, value->data, column->width);
        else return SEEN_UNFIT;
        return 0;
    case DATE:
        if ((seen = read_datetime(value, &us)) != 0) return seen;
        int32_t days = (int32_t)((us >= 0 ? us : us - (DAY_US - 1)) / DAY_US);
        memcpy(to, &days, 4);
        return 0;
    case TIMESTAMP:
        if ((seen = read_datetime(value, &us)) != 0) return seen;
        memcpy(to, &us, 8);
        return 0;
    case DAYTIME:
        if ((seen = read_time(value, &us)) != 0) return seen;
        if (us < 0 || us >= DAY_US) return SEEN_FAR;
        memcpy(to, &us, 8);
        return 0;
    case DURATION:
        if ((seen = read_time(value, &us)) != 0) return seen;
        memcpy(to, &us, 8);
        return 0;
    case DECIMAL: {
        uint64_t words[4];
        if ((seen = read_decimal(column, value, words)) != 0) return seen;
        memcpy(to, words, column->width);
        return 0;
    }
    case BOOL: {
        uint8_t set = 0;
        for (uint64_t place = 0; place < value->length; place++) set |= value->data[place];
        if (set > 1) return SEEN_ODD;
        if (set) column->out.to[row >> 3] |= (uint8_t)(1u << (row & 7));
        return 0;
    }
    default:
        memcpy(column->out.text + column->out.used, value->data, value->length);
        column->out.used += (int32_t)value->length;
        return 0;
    }
}

static void write_row(const uint8_t *row, const uint8_t *end, Column *columns, Py_ssize_t count, Py_ssize_t number) {
    const uint8_t *at = row + 1 + (count + 9) / 8;
    for (Py_ssize_t place = 0; place < count; place++) {
        Column *column = &columns[place];
        uint8_t seen = 0;
        bool null = is_null(row, place);
        if (!null) {
            Value value;
            take(column->wire, &at, end, &value);
            seen = write_value(column, number, &value);
        }
        if (null || seen) {
            column->out.seen |= seen;
            column->out.nulls++;
            column->out.valid[number >> 3] &= (uint8_t)~(1u << (number & 7));
            memset(column->out.to + number * column->width, 0, column->width);
        }
        if (column->out.text != NULL) memcpy(column->out.to + (number + 1) * 4, &column->out.used, 4);
    }
}

/* ------------------------------------------------------------------------------------------------ packets */

/* The packets of whole rows from *from* on: where they end, how many there are, and what comes after them. */
static const char *measure(const uint8_t **from, const uint8_t *end, Column *columns, Py_ssize_t count,
                           Py_ssize_t *rows, int *stopped) {
    const uint8_t *at = *from;
    *stopped = MORE;
    while (end - at >= 4) {
        uint64_t length = little(at, 3);
        if (length == MOST_PACKET) {
            *stopped = LONG;
            break;
        }
        if ((uint64_t)(end - at) < 4 + length) break;
        if (length == 0) return "a packet is empty";
        if (at[4] != 0) { /* the end of the rows, or an error */
            *stopped = LAST;
            break;
        }
        const char *wrong = measure_row(at + 4, at + 4 + length, columns, count);
        if (wrong != NULL) return wrong;
        at += 4 + length;
        (*rows)++;
    }
    *from = at;
    return NULL;
}

static int width_of(const Column *column) {
    return column->kind == BYTES ? TEXT_WIDTH : column->kind == BOOL ? BIT_WIDTH : column->width;
}

static bool describe(Column *columns, const uint8_t *description, Py_ssize_t count) {
    for (Py_ssize_t place = 0; place < count; place++) {
        Column *column = &columns[place];
        column->wire = description[4 * place];
        column->kind = description[4 * place + 1];
        column->width = description[4 * place + 2];
        column->scale = description[4 * place + 3];
        if (column->wire >= WIRES || column->kind >= KINDS || column->width > 32) return false;
        if ((column->kind == SIGNED || column->kind == UNSIGNED) && (column->wire > INT8 || column->width > 8))
            return false;
        if (column->kind >= BOOL && column->width != 0) return false;
        if (column->kind == DECIMAL && column->width != 16 && column->width != 32) return false;
        if ((column->kind == DATE || column->kind == TIMESTAMP) && column->wire != DATETIME) return false;
        if ((column->kind == DAYTIME || column->kind == DURATION) && column->wire != TIME) return false;
    }
    return true;
}

/* decode(block, size, columns, allocate)
 *     -> (consumed, rows, stopped, [(validity or None, values or offsets, data or None, nulls, seen)])
 *
 * block: packets, of which the first *size* bytes are filled; what is left of a packet at their end is not consumed.
 * size -1: one row without its packet. columns: four bytes for each: wire, kind, width, scale. allocate(size): a
 * writable buffer. stopped: 0 the block ended, 1 a packet that is no row, 2 a row of several packets.
 * ValueError: these are no rows of these columns. */
static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block;
    Py_ssize_t size;
    PyObject *described, *allocate, *made = NULL;
    if (!PyArg_ParseTuple(args, "y*nSO", &block, &size, &described, &allocate)) return NULL;
    Py_ssize_t count = PyBytes_GET_SIZE(described) / 4, rows = 0;
    Column *columns = PyMem_Calloc((size_t)count + 1, sizeof(Column));
    if (columns == NULL) {
        PyBuffer_Release(&block);
        return PyErr_NoMemory();
    }
    if (!describe(columns, (const uint8_t *)PyBytes_AS_STRING(described), count) || size > block.len) {
        PyErr_SetString(PyExc_TypeError, "a column is of no kind that is known");
        goto end;
    }
    bool framed = size >= 0;
    const uint8_t *start = block.buf, *from = start, *last = start + (framed ? size : block.len);
    const char *wrong = NULL;
    int stopped = MORE;
    Py_BEGIN_ALLOW_THREADS;
    if (framed) {
        wrong = measure(&from, last, columns, count, &rows, &stopped);
    } else {
        wrong = measure_row(from, last, columns, count);
        from = last;
        rows = 1;
    }
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
    if (framed) {
        const uint8_t *at = start;
        for (Py_ssize_t row = 0; row < rows; row++) {
            uint64_t length = little(at, 3);
            write_row(at + 4, at + 4 + length, columns, count, row);
            at += 4 + length;
        }
    } else {
        write_row(start, last, columns, count, 0);
    }
    Py_END_ALLOW_THREADS;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t place = 0; list != NULL && place < count; place++) {
        PyObject *column = built_made(&columns[place].out);
        if (column == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, place, column);
    }
    if (list != NULL) made = Py_BuildValue("nniN", from - start, rows, stopped, list);
end:
    for (Py_ssize_t place = 0; place < count; place++) built_clear(&columns[place].out);
    PyMem_Free(columns);
    PyBuffer_Release(&block);
    return made;
}

/* walk(block, start, size) -> (end, stopped)
 *
 * Where the whole packets of rows in [start, size) end, and what comes after them; as decode tells it. */
static PyObject *walk(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer block;
    Py_ssize_t start, size;
    if (!PyArg_ParseTuple(args, "y*nn", &block, &start, &size)) return NULL;
    int stopped = MORE;
    const uint8_t *at = (const uint8_t *)block.buf;
    while (start + 4 <= size && size <= block.len) {
        uint64_t length = little(at + start, 3);
        if (length == MOST_PACKET) {
            stopped = LONG;
            break;
        }
        if ((uint64_t)(size - start) < 4 + length) break;
        if (length > 0 && at[start + 4] != 0) {
            stopped = LAST;
            break;
        }
        start += 4 + (Py_ssize_t)length;
    }
    PyBuffer_Release(&block);
    return Py_BuildValue("ni", start, stopped);
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, NULL},
    {"walk", walk, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.mysql._rows",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
