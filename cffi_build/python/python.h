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

/* messages.c: add its types to the module. Returns 0 or -1. */
int ucch_add_messages(PyObject *module);
#endif
