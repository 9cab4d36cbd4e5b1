/* Posted: the base class of requests of calls that C has begun, messages (messages.c) and collectives (repeat.c); its
 * subclass in Python is ucc_hetero/calls/posted.py's PostedRequest. Waits that take long and errors are left to
 * Python, which makes an ordinary request of it. */
#include "python/python.h"
#ifndef Py_GIL_DISABLED
#include <unistd.h>

/* Seconds to wait before Python checks for signals and lets MPI make progress. */
#define SLICE 0.002
/* Functions of Python for all requests: what a test does if nothing has ended, and the general form of methods. */
enum { IDLE, WAIT, TEST, ENDED, ARM, WAYS };

static PyTypeObject *posted_type, *request_type; /* Posted, and its subclass in Python */
static PyObject *ways[WAYS];

/* Wait for a while until all operations have ended; `timeouts`: NULL if they have deadlines. Returns whether they have
 * ended well. */
int ucch_wait_all_briefly(ucch_op **ops, const double *timeouts, int n) {
    int active = 0, well = 1;
    for (int i = 0; i < n; i++)
        active |= !ucch_peek(ops[i]);
    if (active) {
        Py_BEGIN_ALLOW_THREADS;
        for (int i = 0; timeouts && i < n; i++)
            if (timeouts[i] > 0) ucch_op_deadline(ops[i], timeouts[i]);
        ucch_wait_any(ops, n, 1, SLICE);
        Py_END_ALLOW_THREADS;
    }
    for (int i = 0; i < n; i++)
        well &= ucch_peek(ops[i]) == DONE;
    return well;
}

posted *ucch_posted_new(const posted_kind *kind, PyObject *by, Py_ssize_t *active, ucch_op *op, double timeout) {
    posted *q = (posted *)((allocfunc)PyType_GetSlot(request_type, Py_tp_alloc))(request_type, 0);
    if (!q) return NULL;
    q->kind = kind;
    q->by = Py_NewRef(by);
    q->active = active;
    q->op = op;
    q->timeout = timeout;
    ++*active;
    return q;
}

/* Note that the caller knows of the end, or that the call was not begun. */
void ucch_posted_forget(posted *q) {
    q->done = q->told = 1;
    --*q->active;
    q->op = NULL;
    for (int i = 0; i < KEPT; i++)
        Py_CLEAR(q->kept[i]);
}

static PyObject *in_general(posted *q, int which, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *all = PyTuple_New(n + 1), *more = named ? PyDict_New() : NULL, *result = NULL;
    if (all && (more || !named)) {
        PyTuple_SetItem(all, 0, Py_NewRef(q));
        for (Py_ssize_t i = 0; i < n; i++)
            PyTuple_SetItem(all, i + 1, Py_NewRef(args[i]));
        for (Py_ssize_t i = 0; i < named; i++)
            PyDict_SetItem(more, PyTuple_GetItem(names, i), args[n + i]);
        result = PyObject_Call(ways[which], all, more);
    }
    Py_XDECREF(all);
    Py_XDECREF(more);
    return result;
}

/* Tell the caller of a request that has ended well. After an exception it can be waited for again. */
static PyObject *tell(posted *q, PyObject *status) {
    PyObject *filled = status == Py_None ? Py_NewRef(Py_True) : q->kind->fill(q, status, DONE);
    if (!filled || q->told) return filled;
    if (q->owner) { /* meanwhile another thread has dropped it */
        Py_DECREF(filled);
        return in_general(q, WAIT, &status, 1, NULL);
    }
    if (q->op) q->kind->end(q);
    ucch_posted_forget(q);
    return filled;
}

/* True if no ordinary request was made of it, and no other thread waits for it. */
static int is_ours(const posted *q) { return !q->owner && !q->busy; }

/* Wait(status=None) */
static PyObject *Wait(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    posted *q = (posted *)self;
    PyObject *status = n ? args[0] : Py_None;
    if (!names && n <= 1 && is_ours(q) && !q->done) {
        if (!q->op) return tell(q, status);
        q->busy = 1;
        int well = ucch_wait_all_briefly(&q->op, &q->timeout, 1);
        q->busy = 0;
        if (well) return tell(q, status);
    }
    return in_general(q, WAIT, args, n, names);
}

/* 1: done, 2: failed, 0: active, after a round of progress; -1 with an exception. */
static int state_of(posted *q) {
    int state = q->op ? ucch_peek(q->op) : DONE;
    if (state) return state;
    q->busy = 1;
    Py_BEGIN_ALLOW_THREADS;
    state = ucch_test(q->op);
    Py_END_ALLOW_THREADS;
    q->busy = 0;
    PyObject *idle = state ? NULL : PyObject_CallObject(ways[IDLE], NULL);
    Py_XDECREF(idle);
    return state || idle ? state : -1;
}

/* Test(status=None) */
static PyObject *Test(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) {
    posted *q = (posted *)self;
    if (names || n > 1 || !is_ours(q) || q->done) return in_general(q, TEST, args, n, names);
    int state = state_of(q);
    if (state == DONE) return tell(q, n ? args[0] : Py_None);
    return state < 0 ? NULL : state ? in_general(q, TEST, args, n, names) : Py_NewRef(Py_False);
}

/* The parts of calls on several requests. */

static PyObject *_ended(PyObject *self, PyObject *unused) {
    posted *q = (posted *)self;
    (void)unused;
    if (!is_ours(q) || q->done) return in_general(q, ENDED, NULL, 0, NULL);
    int state = state_of(q);
    return state < 0 ? NULL : PyLong_FromLong(state);
}

static PyObject *_arm(PyObject *self, PyObject *unused) {
    posted *q = (posted *)self;
    (void)unused;
    if (!is_ours(q)) return in_general(q, ARM, NULL, 0, NULL);
    if (q->op && q->timeout > 0) {
        Py_BEGIN_ALLOW_THREADS;
        ucch_op_deadline(q->op, q->timeout);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

/* _fill(state, status): fill the status of a request whose caller knows of its end. False if it does not. */
static PyObject *_fill(PyObject *self, PyObject *args) {
    posted *q = (posted *)self;
    PyObject *status;
    int state;
    if (!PyArg_ParseTuple(args, "iO", &state, &status)) return NULL;
    return q->told ? q->kind->fill(q, status, state) : Py_NewRef(Py_False);
}

/* _address(): of the native operation; 0 if it is an ordinary request or has ended. */
static PyObject *_address(PyObject *self, PyObject *unused) {
    posted *q = (posted *)self;
    (void)unused;
    return PyLong_FromVoidPtr(is_ours(q) ? q->op : NULL);
}

/* _become_ordinary(): hand the operation over to Python. False if the request has ended and its caller knows. */
static PyObject *_become_ordinary(PyObject *self, PyObject *unused) {
    posted *q = (posted *)self;
    (void)unused;
    while (q->busy) { /* another thread waits, for a short while */
        Py_BEGIN_ALLOW_THREADS;
        usleep(100);
        Py_END_ALLOW_THREADS;
    }
    if (q->told) Py_RETURN_FALSE;
    int before = !q->owner;
    PyObject *made = q->kind->adopt(q);
    if (before && q->owner) {
        q->op = NULL;
        --*q->active;
    }
    return made;
}

/* A request that is dropped: its operation goes on, and what it uses lives until its end. */
static void drop(PyObject *self) {
    posted *q = (posted *)self;
    if (q->done || !q->by) return;
    PyObject *type, *value, *trace, *dropped = NULL;
    if (!q->owner && !q->op) { /* a send that has ended */
        --*q->active;
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    dropped = PyObject_CallMethod(self, "_drop", NULL);
    if (!dropped) PyErr_WriteUnraisable(self);
    Py_XDECREF(dropped);
    PyErr_Restore(type, value, trace);
}

static void free_posted(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    posted *q = (posted *)self;
    for (int i = 0; !q->op && i < KEPT; i++) /* else libraries may still use them, and Python could not take over */
        Py_CLEAR(q->kept[i]);
    if (!q->op) Py_CLEAR(q->owner);
    Py_CLEAR(q->by);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef posted_methods[] = {METHOD(Wait, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD(Test, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD(_ended, METH_NOARGS),
                                       METHOD(_arm, METH_NOARGS),
                                       METHOD(_fill, METH_VARARGS),
                                       METHOD(_address, METH_NOARGS),
                                       METHOD(_become_ordinary, METH_NOARGS),
                                       {0}};
static PyMemberDef posted_members[] = {{"_done", T_BOOL, offsetof(posted, done), 0, NULL}, {0}};
static PyType_Slot posted_slots[] = {
    {Py_tp_finalize, drop},
    {Py_tp_dealloc, free_posted},
    {Py_tp_methods, posted_methods},
    {Py_tp_members, posted_members},
    {0, NULL},
};
static PyType_Spec posted_spec = {"ucc_hetero._repeat.Posted", sizeof(posted), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, posted_slots};

/* wait_all(requests): wait for a list of Posted. False if the general way has to do it; none is completed then. */
static PyObject *wait_all(PyObject *module, PyObject *given) {
    Py_ssize_t n = Py_TYPE(given) == &PyList_Type ? PyList_Size(given) : 0, active = 0;
    (void)module;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *each = PyList_GetItem(given, i);
        if (!PyObject_TypeCheck(each, posted_type) || !is_ours((posted *)each)) Py_RETURN_FALSE;
    }
    posted **all = n ? PyMem_Calloc((size_t)n, sizeof(*all) + sizeof(ucch_op *) + sizeof(double)) : NULL;
    ucch_op **ops = all ? (ucch_op **)(all + n) : NULL;
    double *timeouts = all ? (double *)(ops + n) : NULL;
    int well = 0;
    for (Py_ssize_t i = 0; all && i < n; i++) {
        all[i] = (posted *)Py_NewRef(PyList_GetItem(given, i)); /* the list may change meanwhile */
        all[i]->busy = 1;
        timeouts[active] = all[i]->timeout;
        if (all[i]->op) ops[active++] = all[i]->op;
    }
    if (all) well = ucch_wait_all_briefly(ops, timeouts, (int)active);
    for (Py_ssize_t i = 0; all && i < n; i++) {
        all[i]->busy = 0;
        if (well) Py_XDECREF(tell(all[i], Py_None));
        Py_DECREF(all[i]);
    }
    PyMem_Free(all);
    return PyBool_FromLong(well);
}

/* requests(type, idle, wait, test, ended, arm): the subclass of Posted that requests have, and functions for `ways`. */
static PyObject *requests(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 1 + WAYS || !PyType_Check(args[0]) || !PyType_IsSubtype((PyTypeObject *)args[0], posted_type)) {
        PyErr_SetString(PyExc_TypeError, "requests(type, idle, wait, test, ended, arm)");
        return NULL;
    }
    request_type = (PyTypeObject *)Py_NewRef(args[0]);
    for (int i = 0; i < WAYS; i++)
        ways[i] = Py_NewRef(args[1 + i]);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {METHOD(wait_all, METH_O), METHOD(requests, METH_FASTCALL), {0}};

int ucch_add_requests(PyObject *module) {
    posted_type = (PyTypeObject *)PyType_FromSpec(&posted_spec);
    int added = posted_type && !PyModule_AddObjectRef(module, "Posted", (PyObject *)posted_type) &&
                !PyModule_AddFunctions(module, functions);
    return added ? 0 : -1;
}
#endif
