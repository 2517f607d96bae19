/* Rows of TDS, as they come from the socket, into columns: no Python object per value.

   decode(data, columns, most) reads the ROW and NBCROW tokens at the beginning of *data* and gives

       (rows, consumed, stopped, [(valid, values, offsets), ...])

   *columns* has two bytes for each column: its kind (see enum kind) and the width of a value that is of one width; of a
   text, 1 where one that is no Unicode becomes null. Others end it: ValueError, with the number of the column.
   Numbers become 8 bytes each, texts UTF-8 behind offsets of 4 bytes. Reading ends after *most* rows, where a row is not
   all there (stopped = 0), and at any other token (stopped = that token); ORDER and INFO are passed over.
   The contract in Python is headwater.sources.sqlserver.answer. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum kind { WHOLE = 1, WHOLE_N, REAL, REAL_N, BYTES, TEXT, PLAIN, LONG_BYTES, LONG_TEXT, LONG_PLAIN };
enum { T_ORDER = 0xA9, T_INFO = 0xAB, T_ROW = 0xD1, T_NBCROW = 0xD2 };
enum { MORE = -1, NO_MEMORY = -2, NO_TEXT = -3, TOO_LONG = -4, NO_ROW = -5 };

typedef struct {
    uint8_t kind, width;
    uint8_t *valid, *values;
    int32_t *offsets;
    size_t size, room; /* of values, in bytes */
    size_t kept;       /* size before the row that is being read */
} column;

static int has_offsets(uint8_t kind) { return kind >= BYTES; }

static int grow(column *c, size_t more)
{
    if (c->size + more <= c->room)
        return 0;
    size_t room = c->room * 2 + more + 1024;
    uint8_t *made = PyMem_RawRealloc(c->values, room);
    if (!made)
        return NO_MEMORY;
    c->values = made;
    c->room = room;
    return 0;
}

/* UTF-16 in low byte first order, appended as UTF-8. */
static int put_text(column *c, const uint8_t *at, size_t bytes)
{
    if (bytes & 1)
        return NO_TEXT;
    if (grow(c, bytes / 2 * 3))
        return NO_MEMORY;
    uint8_t *out = c->values + c->size;
    const uint8_t *end = at + bytes;
    while (at < end) {
        uint32_t unit = at[0] | at[1] << 8;
        at += 2;
        if (unit < 0x80) {
            *out++ = unit;
        } else if (unit < 0x800) {
            *out++ = 0xC0 | unit >> 6;
            *out++ = 0x80 | (unit & 0x3F);
        } else if (unit < 0xD800 || unit > 0xDFFF) {
            *out++ = 0xE0 | unit >> 12;
            *out++ = 0x80 | (unit >> 6 & 0x3F);
            *out++ = 0x80 | (unit & 0x3F);
        } else {
            if (unit > 0xDBFF || at == end)
                return NO_TEXT;
            uint32_t low = at[0] | at[1] << 8;
            if (low < 0xDC00 || low > 0xDFFF)
                return NO_TEXT;
            at += 2;
            unit = 0x10000 + ((unit & 0x3FF) << 10 | (low & 0x3FF));
            *out++ = 0xF0 | unit >> 18;
            *out++ = 0x80 | (unit >> 12 & 0x3F);
            *out++ = 0x80 | (unit >> 6 & 0x3F);
            *out++ = 0x80 | (unit & 0x3F);
        }
    }
    c->size = out - c->values;
    return 0;
}

static int put(column *c, uint8_t kind, const uint8_t *at, size_t bytes)
{
    if (kind == TEXT)
        return put_text(c, at, bytes);
    if (kind == PLAIN)
        for (size_t n = 0; n < bytes; n++)
            if (at[n] & 0x80)
                return NO_TEXT;
    if (grow(c, bytes))
        return NO_MEMORY;
    memcpy(c->values + c->size, at, bytes);
    c->size += bytes;
    return 0;
}

/* A number of *width* bytes as 8. A whole number of one byte has no sign. */
static int put_number(column *c, uint8_t kind, const uint8_t *at, size_t width)
{
    int64_t whole = 0;
    double real = 0;
    if (grow(c, 8))
        return NO_MEMORY;
    if (kind == REAL) {
        float narrow;
        if (width == 4) {
            memcpy(&narrow, at, 4);
            real = narrow;
        } else if (width == 8) {
            memcpy(&real, at, 8);
        } else if (width) {
            return NO_ROW;
        }
        memcpy(c->values + c->size, &real, 8);
    } else {
        int16_t two;
        int32_t four;
        switch (width) {
        case 0: break;
        case 1: whole = at[0]; break;
        case 2: memcpy(&two, at, 2); whole = two; break;
        case 4: memcpy(&four, at, 4); whole = four; break;
        case 8: memcpy(&whole, at, 8); break;
        default: return NO_ROW;
        }
        memcpy(c->values + c->size, &whole, 8);
    }
    c->size += 8;
    return 0;
}

static uint64_t u64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return v; }
static uint32_t u32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return v; }
static uint16_t u16(const uint8_t *at) { uint16_t v; memcpy(&v, at, 2); return v; }

/* A text that is no Unicode is null where that is wanted: nothing was put. */
static int forgiven(const column *c, int failed, int *is_null)
{
    if (failed != NO_TEXT || !c->width)
        return failed;
    *is_null = 1;
    return 0;
}

/* A value in chunks; *is_null is set where there is none. How many bytes it took, or less than 0. */
static Py_ssize_t put_chunks(column *c, uint8_t kind, const uint8_t *at, Py_ssize_t left, int *is_null)
{
    if (left < 8)
        return MORE;
    if (u64(at) == UINT64_MAX) {
        *is_null = 1;
        return 8;
    }
    Py_ssize_t taken = 8, first = 0;
    size_t total = 0, chunks = 0;
    for (;;) { /* is it all there? */
        if (left - taken < 4)
            return MORE;
        size_t length = u32(at + taken);
        if (!length)
            break;
        if (left - taken - 4 < (Py_ssize_t)length)
            return MORE;
        if (!chunks++)
            first = taken + 4;
        total += length;
        taken += 4 + length;
    }
    int failed = 0;
    if (chunks == 1) {
        failed = put(c, kind, at + first, total);
    } else if (chunks) { /* a character may lie in two of them */
        uint8_t *whole = PyMem_RawMalloc(total);
        if (!whole)
            return NO_MEMORY;
        size_t filled = 0;
        for (Py_ssize_t place = 8; u32(at + place); place += 4 + u32(at + place)) {
            memcpy(whole + filled, at + place + 4, u32(at + place));
            filled += u32(at + place);
        }
        failed = put(c, kind, whole, total);
        PyMem_RawFree(whole);
    }
    failed = forgiven(c, failed, is_null);
    return failed ? failed : taken + 4;
}

/* One value at *at*: how many bytes it took, or less than 0. */
static Py_ssize_t put_value(column *c, const uint8_t *at, Py_ssize_t left, int *is_null)
{
    static const uint8_t nothing[8] = {0};
    Py_ssize_t length;
    int failed;
    switch (c->kind) {
    case WHOLE:
    case REAL:
        if (left < c->width)
            return MORE;
        failed = put_number(c, c->kind, at, c->width);
        return failed ? failed : c->width;
    case WHOLE_N:
    case REAL_N:
        if (left < 1 || left < 1 + at[0])
            return MORE;
        *is_null = !at[0];
        failed = put_number(c, c->kind - 1, at[0] ? at + 1 : nothing, at[0]);
        return failed ? failed : 1 + at[0];
    case BYTES:
    case TEXT:
    case PLAIN:
        if (left < 2)
            return MORE;
        length = u16(at);
        if (length == 0xFFFF) {
            *is_null = 1;
            return 2;
        }
        if (left < 2 + length)
            return MORE;
        failed = forgiven(c, put(c, c->kind, at + 2, length), is_null);
        return failed ? failed : 2 + length;
    default:
        return put_chunks(c, c->kind - (LONG_BYTES - BYTES), at, left, is_null);
    }
}

/* One row behind its token: how many bytes it took, or less than 0; *reached is the column that it came to. */
static Py_ssize_t put_row(column *columns, Py_ssize_t count, Py_ssize_t row, const uint8_t *at, Py_ssize_t left, int nbc,
                          Py_ssize_t *reached)
{
    const uint8_t *nulls = at;
    Py_ssize_t taken = nbc ? (count + 7) / 8 : 0;
    if (left < taken)
        return MORE;
    for (Py_ssize_t place = 0; place < count; place++) {
        column *c = columns + place;
        *reached = place;
        int is_null = nbc && (nulls[place / 8] >> (place % 8) & 1);
        if (is_null) {
            if (!has_offsets(c->kind)) {
                if (grow(c, 8))
                    return NO_MEMORY;
                memset(c->values + c->size, 0, 8);
                c->size += 8;
            }
        } else {
            Py_ssize_t took = put_value(c, at + taken, left - taken, &is_null);
            if (took < 0)
                return took;
            taken += took;
        }
        c->valid[row] = !is_null;
        if (has_offsets(c->kind)) {
            if (c->size > INT32_MAX)
                return TOO_LONG;
            c->offsets[row + 1] = (int32_t)c->size;
        }
    }
    return taken;
}

static PyObject *made_columns(column *columns, Py_ssize_t count, Py_ssize_t rows)
{
    PyObject *made = PyList_New(count);
    if (!made)
        return NULL;
    for (Py_ssize_t place = 0; place < count; place++) {
        column *c = columns + place;
        PyObject *one;
        if (has_offsets(c->kind))
            one = Py_BuildValue("y#y#y#", c->valid, rows, c->values ? (char *)c->values : "", (Py_ssize_t)c->size,
                                c->offsets, (Py_ssize_t)((rows + 1) * 4));
        else
            one = Py_BuildValue("y#y#O", c->valid, rows, c->values ? (char *)c->values : "", (Py_ssize_t)c->size, Py_None);
        if (!one) {
            Py_DECREF(made);
            return NULL;
        }
        PyList_SET_ITEM(made, place, one);
    }
    return made;
}

static PyObject *decode(PyObject *self, PyObject *arguments)
{
    (void)self;
    Py_buffer data, spec;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "y*y*n", &data, &spec, &most))
        return NULL;
    Py_ssize_t count = spec.len / 2, rows = 0, at = 0, took = 0, reached = 0;
    int stopped = 0, full = 0;
    PyObject *result = NULL;
    column *columns = PyMem_RawCalloc(count ? count : 1, sizeof(column));
    if (!columns)
        goto memory;
    for (Py_ssize_t place = 0; place < count; place++) {
        column *c = columns + place;
        c->kind = ((uint8_t *)spec.buf)[2 * place];
        c->width = ((uint8_t *)spec.buf)[2 * place + 1];
        c->valid = PyMem_RawMalloc(most ? most : 1);
        c->offsets = has_offsets(c->kind) ? PyMem_RawCalloc(most + 1, 4) : NULL;
        if (!c->valid || (has_offsets(c->kind) && !c->offsets))
            goto memory;
    }
    const uint8_t *bytes = data.buf;
    Py_BEGIN_ALLOW_THREADS
    while (rows < most && at < data.len) {
        uint8_t token = bytes[at];
        if (token == T_ORDER || token == T_INFO) {
            if (data.len - at < 3 || data.len - at < 3 + u16(bytes + at + 1))
                break;
            at += 3 + u16(bytes + at + 1);
            continue;
        }
        if (token != T_ROW && token != T_NBCROW) {
            stopped = token;
            break;
        }
        for (Py_ssize_t place = 0; place < count; place++)
            columns[place].kept = columns[place].size;
        took = put_row(columns, count, rows, bytes + at + 1, data.len - at - 1, token == T_NBCROW, &reached);
        if (took < 0) { /* as if the row had not begun */
            for (Py_ssize_t place = 0; place < count; place++)
                columns[place].size = columns[place].kept;
            full = took == TOO_LONG && rows > 0;
            break;
        }
        at += 1 + took;
        rows++;
    }
    Py_END_ALLOW_THREADS
    if (took == NO_MEMORY)
        goto memory;
    if (took == NO_TEXT) {
        PyObject *told = Py_BuildValue("sn", "a text is no Unicode", reached);
        if (told)
            PyErr_SetObject(PyExc_ValueError, told);
        Py_XDECREF(told);
    }
    else if (took == NO_ROW || (took == TOO_LONG && !full))
        PyErr_SetString(PyExc_ValueError, "a row is not of its columns");
    else {
        PyObject *made = made_columns(columns, count, rows);
        if (made)
            result = Py_BuildValue("nniN", rows, at, stopped, made);
    }
    goto end;
memory:
    PyErr_NoMemory();
end:
    for (Py_ssize_t place = 0; columns && place < count; place++) {
        PyMem_RawFree(columns[place].valid);
        PyMem_RawFree(columns[place].values);
        PyMem_RawFree(columns[place].offsets);
    }
    PyMem_RawFree(columns);
    PyBuffer_Release(&data);
    PyBuffer_Release(&spec);
    return result;
}

static PyMethodDef methods[] = {{"decode", decode, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tds_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tds_rows(void) { return PyModule_Create(&module); }
