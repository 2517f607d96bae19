/* Gathers text and bytes: the values of an Arrow column in another order.
 *
 * Arrow's own take costs about 35 ns for each value; copying them by their lengths costs a quarter of it, and rows are
 * put into the order of their vnodes on every write of a log. headwater/stream/gather.py falls back to Arrow's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline bool bit(const uint8_t *bits, int64_t place) { return bits[place >> 3] >> (place & 7) & 1; }

#define AHEAD 16

/* Up to 64 bytes in moves of a fixed size, which write over what the next value overwrites; more in a call. */
static inline void copy(char *to, const char *from, int32_t length, const char *to_end, const char *from_end) {
    if (length <= 16 && to_end - to >= 16 && from_end - from >= 16) memcpy(to, from, 16);
    else if (length <= 64 && to_end - to >= 64 && from_end - from >= 64) memcpy(to, from, 64);
    else memcpy(to, from, (size_t)length);
}

/* (offsets, data, validity or None, start, rows, order) -> (offsets, data, validity or None, nulls)
 *
 * start and rows: where the column lies in its buffers. order: int64, places within the column. */
static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer offsets, data, order, validity = {0};
    PyObject *valid;
    Py_ssize_t start, rows;
    if (!PyArg_ParseTuple(args, "y*y*Onny*", &offsets, &data, &valid, &start, &rows, &order)) return NULL;
    PyObject *new_offsets = NULL, *new_data = NULL, *new_valid = NULL, *made = NULL;
    if (valid != Py_None && PyObject_GetBuffer(valid, &validity, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = order.len / 8;
    const int64_t *places = order.buf;
    if (start < 0 || rows < 0 || offsets.len < (start + rows + 1) * 4
        || (valid != Py_None && validity.len < (start + rows + 7) / 8)) {
        PyErr_SetString(PyExc_ValueError, "a column is longer than its buffers");
        goto end;
    }
    const int32_t *from = (const int32_t *)offsets.buf + start;
    int64_t total = 0;
    for (Py_ssize_t row = 0; row < count; row++) {
        if (places[row] < 0 || places[row] >= rows) {
            PyErr_SetString(PyExc_IndexError, "a place beyond the column");
            goto end;
        }
        int32_t first = from[places[row]], last = from[places[row] + 1];
        if (first < 0 || last < first || last > data.len) {
            PyErr_SetString(PyExc_ValueError, "a value beyond the data");
            goto end;
        }
        total += last - first;
    }
    if (total > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the values are more than 2 GiB");
        goto end;
    }
    new_offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4);
    new_data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (valid != Py_None) new_valid = PyBytes_FromStringAndSize(NULL, (count + 7) / 8);
    if (new_offsets == NULL || new_data == NULL || (valid != Py_None && new_valid == NULL)) goto end;
    int32_t *to = (int32_t *)PyBytes_AS_STRING(new_offsets), used = 0;
    char *into = PyBytes_AS_STRING(new_data), *into_end = into + total;
    const char *source = data.buf, *source_end = source + data.len;
    Py_ssize_t nulls = 0;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t row = 0; row < count; row++) {
        int32_t first = from[places[row]], length = from[places[row] + 1] - first;
        if (row + AHEAD < count) {
            const char *later = source + from[places[row + AHEAD]];
            __builtin_prefetch(later);
            __builtin_prefetch(later + 63);
        }
        to[row] = used;
        copy(into + used, source + first, length, into_end, source_end);
        used += length;
    }
    to[count] = used;
    if (valid != Py_None) {
        uint8_t *bits = (uint8_t *)PyBytes_AS_STRING(new_valid);
        memset(bits, 0, (size_t)((count + 7) / 8));
        for (Py_ssize_t row = 0; row < count; row++) {
            bool is_valid = bit(validity.buf, start + places[row]);
            bits[row >> 3] |= (uint8_t)(is_valid << (row & 7));
            nulls += !is_valid;
        }
    }
    Py_END_ALLOW_THREADS;
    made = Py_BuildValue("OOOn", new_offsets, new_data, valid == Py_None ? Py_None : new_valid, nulls);
end:
    Py_XDECREF(new_offsets);
    Py_XDECREF(new_data);
    Py_XDECREF(new_valid);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    PyBuffer_Release(&order);
    if (validity.obj != NULL) PyBuffer_Release(&validity);
    return made;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.stream._gather",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__gather(void) { return PyModule_Create(&module); }
