/* What the decoders of all databases build Arrow columns with: bytes that grow (Buffer), for decoders that do not know
 * how much comes; and columns of a known size (Built), in buffers that the caller gives.
 */

#ifndef HEADWATER_ARROW_BUILDERS_H
#define HEADWATER_ARROW_BUILDERS_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Raises what *make* gives for *reason*, unless something is raised already; -1. */
static inline int raise_made(PyObject *make, const char *reason) {
    if (PyErr_Occurred()) return -1;
    PyObject *error = PyObject_CallFunction(make, "s", reason);
    if (error == NULL) return -1;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return -1;
}

/* ------------------------------------------------------------------------------------------------ growing bytes */

typedef struct {
    PyObject *bytes;
    char *at;
    Py_ssize_t capacity;
} Buffer;

static __attribute__((noinline, unused)) int buffer_room_slow(Buffer *buffer, Py_ssize_t wanted) {
    Py_ssize_t capacity = buffer->capacity < 64 ? 64 : buffer->capacity;
    while (capacity < wanted) {
        if (capacity > PY_SSIZE_T_MAX / 2) {
            PyErr_NoMemory();
            return -1;
        }
        capacity *= 2;
    }
    if (buffer->bytes == NULL) {
        buffer->bytes = PyBytes_FromStringAndSize(NULL, capacity);
        if (buffer->bytes == NULL) return -1;
    } else if (_PyBytes_Resize(&buffer->bytes, capacity) < 0) {
        buffer->at = NULL;
        buffer->capacity = 0;
        return -1;
    }
    buffer->at = PyBytes_AS_STRING(buffer->bytes);
    buffer->capacity = capacity;
    return 0;
}

static inline int buffer_room(Buffer *buffer, Py_ssize_t wanted) {
    return wanted <= buffer->capacity ? 0 : buffer_room_slow(buffer, wanted);
}

static inline void buffer_clear(Buffer *buffer) {
    Py_CLEAR(buffer->bytes);
    buffer->at = NULL;
    buffer->capacity = 0;
}

/* Hands the first *used* bytes over and starts anew. */
static inline PyObject *buffer_take(Buffer *buffer, Py_ssize_t used) {
    if (buffer->bytes == NULL) return PyBytes_FromStringAndSize(NULL, 0);
    PyObject *taken = buffer->bytes;
    buffer->bytes = NULL;
    buffer->at = NULL;
    buffer->capacity = 0;
    if (_PyBytes_Resize(&taken, used) < 0) return NULL;
    return taken;
}

/* Validity as Arrow wants it, from one byte per row; None where nothing is null. */
static inline PyObject *packed(const char *valid, Py_ssize_t rows, Py_ssize_t *nulls) {
    *nulls = 0;
    for (Py_ssize_t row = 0; row < rows; row++) *nulls += !(valid[row] & 1);
    if (*nulls == 0) Py_RETURN_NONE;
    PyObject *bitmap = PyBytes_FromStringAndSize(NULL, (rows + 7) / 8);
    if (bitmap == NULL) return NULL;
    char *bits = PyBytes_AS_STRING(bitmap);
    memset(bits, 0, (size_t)((rows + 7) / 8));
    for (Py_ssize_t row = 0; row < rows; row++) bits[row >> 3] |= (char)((valid[row] & 1) << (row & 7));
    return bitmap;
}

/* ------------------------------------------------------------------------------------------------ built columns */

/* Widths of a value that are no number of bytes. */
enum { TEXT_WIDTH = -1, BIT_WIDTH = 0 };

typedef struct {
    uint8_t seen;
    Py_ssize_t nulls;
    int64_t size; /* of data */
    PyObject *validity, *values, *data;
    Py_buffer into_validity, into_values, into_data;
    uint8_t *valid, *to;
    char *text;
    int32_t used;
} Built;

static inline PyObject *room(PyObject *allocate, int64_t size, Py_buffer *into) {
    PyObject *made = PyObject_CallFunction(allocate, "n", (Py_ssize_t)size);
    if (made == NULL) return NULL;
    if (PyObject_GetBuffer(made, into, PyBUF_WRITABLE) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    if (into->len < size) {
        PyErr_SetString(PyExc_MemoryError, "a buffer is smaller than was asked for");
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

/* Room for *rows* values of *width* bytes, or one of the widths above; texts take size bytes. All count as valid. */
static inline bool built_room(Built *column, Py_ssize_t rows, int width, PyObject *allocate) {
    Py_ssize_t bits = (rows + 7) / 8;
    Py_ssize_t size = width == TEXT_WIDTH ? (rows + 1) * 4 : width == BIT_WIDTH ? bits : rows * width;
    if ((column->validity = room(allocate, bits, &column->into_validity)) == NULL) return false;
    if ((column->values = room(allocate, size, &column->into_values)) == NULL) return false;
    column->valid = column->into_validity.buf;
    column->to = column->into_values.buf;
    memset(column->valid, 0xFF, (size_t)bits);
    if (width == BIT_WIDTH) memset(column->to, 0, (size_t)bits);
    if (width != TEXT_WIDTH) return true;
    memset(column->to, 0, 4);
    /* one byte more: the room of nothing has no address */
    if ((column->data = room(allocate, column->size + 1, &column->into_data)) == NULL) return false;
    column->text = column->into_data.buf;
    return true;
}

static inline void built_clear(Built *column) {
    if (column->into_validity.obj != NULL) PyBuffer_Release(&column->into_validity);
    if (column->into_values.obj != NULL) PyBuffer_Release(&column->into_values);
    if (column->into_data.obj != NULL) PyBuffer_Release(&column->into_data);
    Py_XDECREF(column->validity);
    Py_XDECREF(column->values);
    Py_XDECREF(column->data);
}

/* (validity or None, values or offsets, data or None, nulls, seen) */
static inline PyObject *built_made(const Built *column) {
    return Py_BuildValue("OOOni", column->nulls ? column->validity : Py_None, column->values,
                         column->data == NULL ? Py_None : column->data, column->nulls, (int)column->seen);
}

#endif
