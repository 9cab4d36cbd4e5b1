/* The module ucc_hetero._repeat: numpy's arrays, and the types of its files. */
#pragma once
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <string.h>
#include <structmember.h>

#include "rma/rma.h"

/* Flags of numpy arrays. */
#define CONTIGUOUS 0x1
#define WRITEABLE 0x400

#define METHOD(name, how) {#name, (PyCFunction)(void (*)(void))name, how, NULL}

/* The beginning of numpy's PyArrayObject. */
typedef struct array {
    PyObject_HEAD;
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *dtype;
    int flags;
} array;

/* Elements of an array. */
static inline Py_ssize_t elements(const array *a) {
    Py_ssize_t n = 1;
    for (int i = 0; i < a->nd; i++)
        n *= a->dimensions[i];
    return n;
}

extern PyTypeObject *ucch_ndarray; /* NULL: the type of arrays is not known */

/* A request that C has begun and waits for: of a message, or of a collective. */
typedef struct posted posted;

/* What differs between the two. */
typedef struct posted_kind {
    PyObject *(*fill)(posted *q, PyObject *status, int state); /* fill the status of a call in this state */
    void (*end)(posted *q);                                    /* let go of the operation, which has ended well */
    PyObject *(*adopt)(posted *q);                             /* let Python make an ordinary request of it */
} posted_kind;

enum { KEPT = 5 };

struct posted {
    PyObject_HEAD;
    const posted_kind *kind;
    /* The Messenger or Repeater, and its number of requests that are neither waited for nor dropped, nor handed over to
     * Python. */
    PyObject *by;
    Py_ssize_t *active;
    /* NULL after its end, and once an ordinary request has been made of it, which `owner` belongs to. */
    ucch_op *op;
    PyObject *owner;
    PyObject *kept[KEPT]; /* what the operation uses */
    double timeout;       /* seconds that a wait may take; 0: the operation has had its deadline since its start */
    Py_ssize_t spare;     /* of a collective: idle programs that are kept */
    int peer, tag, receives;
    ucp_tag_recv_info_t info; /* of a receive that has ended */
    char done;                /* as Python's requests have it */
    char told;                /* the caller knows of the end */
    char busy;                /* a thread uses `op` without the GIL */
};

/* Results of ucch_wait; 0: still active. */
enum { DONE = 1, FAILED };

/* requests.c: a new request, with an active operation; and one that could not be begun, in the end. */
posted *ucch_posted_new(const posted_kind *kind, PyObject *by, Py_ssize_t *active, ucch_op *op, double timeout);
void ucch_posted_forget(posted *q);
int ucch_wait_all_briefly(ucch_op **ops, const double *timeouts, int n);

/* Add the types of requests.c, and of messages.c, to the module. Return 0 or -1. */
int ucch_add_requests(PyObject *module);
int ucch_add_messages(PyObject *module);
#endif
