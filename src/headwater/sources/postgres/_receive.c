/* The rows of a COPY as libpq gives them, many at a time and without an object for each.
 *
 * libpq is the one that psycopg has loaded: its functions and the connection come as addresses. What a message is and
 * where the stream ends is libpq's business; errors are asked for in Python, which has the words for them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef int (*GetCopyData)(void *connection, char **buffer, int async);
typedef int (*ConsumeInput)(void *connection);
typedef void (*FreeMemory)(void *memory);

enum { INTERRUPTED = -4, BROKEN = -3, FULL = 1 }; /* beside -1 and -2 of PQgetCopyData: the end, an error */

static int room(PyObject **block, Py_ssize_t size) {
    PyGILState_STATE state = PyGILState_Ensure();
    int made = _PyBytes_Resize(block, size);
    PyGILState_Release(state);
    return made;
}

/* receive(get_copy_data, consume_input, free, connection, socket, patience_ms, size) -> (status, block)
 *
 * Whole messages, *size* bytes of them or a little more; fewer where the status is not FULL. */
static PyObject *receive(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long get_address, consume_address, free_address, connection_address;
    int descriptor, patience;
    Py_ssize_t size, held = 0;
    if (!PyArg_ParseTuple(args, "KKKKiin", &get_address, &consume_address, &free_address, &connection_address,
                          &descriptor, &patience, &size))
        return NULL;
    GetCopyData get_copy_data = (GetCopyData)(uintptr_t)get_address;
    ConsumeInput consume_input = (ConsumeInput)(uintptr_t)consume_address;
    FreeMemory free_memory = (FreeMemory)(uintptr_t)free_address;
    void *connection = (void *)(uintptr_t)connection_address;
    Py_ssize_t capacity = size + (size >> 3) + 4096;
    PyObject *block = PyBytes_FromStringAndSize(NULL, capacity);
    if (block == NULL) return NULL;
    struct pollfd waiting = {.fd = descriptor, .events = POLLIN};
    int status = FULL;
    bool quiet = false;
    bool asked = false; /* whether libpq has looked at the socket since it last had a message */
    Py_BEGIN_ALLOW_THREADS;
    while (held < size) {
        char *message = NULL;
        int length = get_copy_data(connection, &message, 1);
        if (length > 0) {
            if (held + length > capacity) {
                capacity = held + length + (held >> 1);
                if (room(&block, capacity) < 0) {
                    free_memory(message);
                    break;
                }
            }
            memcpy(PyBytes_AS_STRING(block) + held, message, (size_t)length);
            held += length;
            free_memory(message);
            asked = false;
        } else if (length < 0) {
            status = length;
            break;
        } else {
            if (asked) {
                int ready = poll(&waiting, 1, patience);
                if (ready < 0) {
                    status = errno == EINTR ? INTERRUPTED : BROKEN;
                    break;
                }
                if (ready == 0) quiet = true;
            }
            asked = true;
            if (!consume_input(connection)) {
                status = BROKEN;
                break;
            }
            if (quiet) { /* Python decides how long it may be; what libpq has taken now comes with the next call */
                status = INTERRUPTED;
                break;
            }
        }
    }
    Py_END_ALLOW_THREADS;
    if (block == NULL || _PyBytes_Resize(&block, held) < 0) return NULL;
    return Py_BuildValue("iN", status, block);
}

static PyMethodDef methods[] = {
    {"receive", receive, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.postgres._receive",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__receive(void) { return PyModule_Create(&module); }
