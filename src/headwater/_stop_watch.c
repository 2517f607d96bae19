/* Ends a process that was asked to stop, also while a library holds Python's lock.
 *
 * Clients of object stores wait for an answer with the lock held; no thread of Python runs then. A thread without Python
 * reads the numbers of signals, hands them on, and ends the process. headwater/stopping.py does the same in Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct watch {
    int from, to;
    uint64_t signals;
    struct timespec left;
    char *message;
};

static void *run(void *given) {
    struct watch *watch = given;
    unsigned char number;
    for (;;) {
        ssize_t got = read(watch->from, &number, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return NULL;
        if (number < 64 && watch->signals >> number & 1) break;
    }
    while (write(watch->to, &number, 1) < 0 && errno == EINTR) continue;
    while (nanosleep(&watch->left, &watch->left) < 0 && errno == EINTR) continue;
    if (write(STDERR_FILENO, watch->message, strlen(watch->message)) < 0) _exit(0);
    _exit(0);
}

/* (from, to, signals as a mask, seconds, message) */
static PyObject *start(PyObject *Py_UNUSED(module), PyObject *args) {
    int from, to;
    unsigned long long signals;
    double seconds;
    const char *message;
    if (!PyArg_ParseTuple(args, "iiKds", &from, &to, &signals, &seconds, &message)) return NULL;
    struct watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL || (watch->message = strdup(message)) == NULL) {
        free(watch);
        return PyErr_NoMemory();
    }
    watch->from = from;
    watch->to = to;
    watch->signals = signals;
    watch->left.tv_sec = (time_t)seconds;
    watch->left.tv_nsec = (long)((seconds - (double)watch->left.tv_sec) * 1e9);
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the other threads */
    int failed = pthread_create(&thread, NULL, run, watch);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(watch->message);
        free(watch);
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    pthread_detach(thread);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._stop_watch",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__stop_watch(void) { return PyModule_Create(&module); }
