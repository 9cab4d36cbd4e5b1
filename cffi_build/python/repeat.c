/* Blocking calls that were made before, and transfers of one piece, from Python to completion in one crossing into C:
 * the module ucc_hetero._repeat, in the same file as cffi's module.
 *
 * Calls are told apart by pointers: the call's name, its operation, and for numpy arrays (whose struct is part of
 * numpy's ABI) the dtype and length. Everything else is handled in Python. */
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <string.h>
#include <structmember.h>

#include "rma/rma.h"

/* Entries of the table, and entries in which one call may be kept. */
#define ENTRIES 256
#define PLACES 4
/* Seconds to wait before Python checks for signals. */
#define SLICE 0.05
/* Flags of numpy arrays. */
#define CONTIGUOUS 0x1
#define WRITEABLE 0x400

enum { NAME, SEND, RECV, OP, ROOT, COUNTS, STREAM };
enum { OUTOF, INTO, SIDES };
/* Objects that distinguish calls; the dtypes of both buffers come first. */
enum { BY_NAME = SIDES, BY_OP, BY_ROOT, OBJECTS };
enum { PEER, WHAT, LOCAL, TARGET, HERE, THERE, BYTES, NUMBERS };
/* Results of ucch_wait; 0: still active. */
enum { DONE = 1, FAILED };

/* The beginning of numpy's PyArrayObject. */
typedef struct array {
    PyObject_HEAD;
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *dtype;
    int flags;
} array;

/* What distinguishes calls. Its objects are kept alive, so that no other object gets their address. */
typedef struct signature {
    PyObject *objects[OBJECTS];
    Py_ssize_t sizes[SIDES];
} signature;

typedef struct entry {
    signature of;
    PyObject *held; /* (kind, program); NULL: the entry is free */
    ucch_program *native;
    int busy; /* its program is in use by another thread */
} entry;

typedef struct repeater {
    PyObject_HEAD;
    PyObject *general, *goes_on, *given_up, *in_place;
    double timeout;
    entry entries[ENTRIES];
} repeater;

static PyTypeObject *ndarray;

/* Describe one buffer of a call. Returns 0 if Python has to do it. */
static int describe_fast(const repeater *r, PyObject *given, int side, signature *of, void **address) {
    of->objects[side] = NULL;
    of->sizes[side] = 0;
    *address = NULL;
    if (given == Py_None || given == r->in_place) return 1;
    if (Py_TYPE(given) != ndarray) return 0;
    const array *a = (const array *)given;
    int due = side == INTO ? CONTIGUOUS | WRITEABLE : CONTIGUOUS;
    of->objects[side] = a->dtype;
    of->sizes[side] = 1;
    for (int i = 0; i < a->nd; i++)
        of->sizes[side] *= a->dimensions[i];
    *address = a->data;
    return (a->flags & due) == due;
}

/* Find a call's signature. Returns 0 if it has none. */
static int read_call(const repeater *r, PyObject *const *args, Py_ssize_t n, signature *of, void **addresses) {
    if (!ndarray || n < ROOT + 1 || (n > COUNTS && args[COUNTS] != Py_None) || (n > STREAM && args[STREAM] != Py_None))
        return 0;
    of->objects[BY_NAME] = args[NAME];
    of->objects[BY_OP] = args[OP];
    of->objects[BY_ROOT] = args[ROOT];
    return describe_fast(r, args[SEND], OUTOF, of, &addresses[OUTOF]) &&
           describe_fast(r, args[RECV], INTO, of, &addresses[INTO]);
}

/* The first of the PLACES entries in which this call may be kept. */
static entry *places(repeater *r, const signature *of) {
    static const uintptr_t weights[OBJECTS] = {[INTO] = 1, [BY_NAME] = 31, [BY_OP] = 7, [BY_ROOT] = 3};
    uintptr_t mixed = (uintptr_t)(of->sizes[OUTOF] * 5 + of->sizes[INTO]);
    for (int i = 0; i < OBJECTS; i++)
        mixed += (uintptr_t)of->objects[i] / 16 * weights[i];
    return &r->entries[(mixed ^ mixed >> 7) % (ENTRIES / PLACES) * PLACES];
}

static entry *find(repeater *r, const signature *of) {
    entry *at = places(r, of);
    for (int i = 0; i < PLACES; i++)
        if (at[i].held && !memcmp(&at[i].of, of, sizeof(*of))) return &at[i];
    return NULL;
}

/* Empty an entry. Returns its `held`, which the caller has to release, or NULL. */
static PyObject *take(entry *e) {
    entry gone = *e;
    memset(e, 0, sizeof(*e)); /* first: destructors may use the table */
    for (int i = 0; i < OBJECTS; i++)
        Py_XDECREF(gone.of.objects[i]);
    return gone.held;
}

/* Run a program: briefly with the GIL, then without it. */
static int run(ucch_program *p, void *const *addresses, double timeout) {
    int state = ucch_program_try(p, addresses[OUTOF], addresses[INTO], timeout);
    if (state == UCCH_LATER || !state) {
        Py_BEGIN_ALLOW_THREADS;
        state = state ? ucch_program_run(p, addresses[OUTOF], addresses[INTO], timeout, SLICE)
                      : ucch_wait(ucch_program_op(p), SLICE);
        Py_END_ALLOW_THREADS;
    }
    return state;
}

static PyObject *fall_back(const repeater *r, PyObject *const *args, Py_ssize_t n) {
    PyObject *all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; i++)
        PyTuple_SetItem(all, i, Py_NewRef(args[i]));
    PyObject *result = all ? PyObject_CallObject(r->general, all) : NULL;
    Py_XDECREF(all);
    return result;
}

/* Wait for a call that is still active, or raise its error. If an exception such as KeyboardInterrupt ends the wait,
 * which may come before Python's first line, the call's buffers are kept alive. */
static PyObject *go_on(const repeater *r, PyObject *held, PyObject *send, PyObject *recv) {
    PyObject *result = PyObject_CallFunctionObjArgs(r->goes_on, held, send, recv, NULL), *type, *value, *trace;
    if (result) return result;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *kept = PyObject_CallFunctionObjArgs(r->given_up, held, send, recv, NULL);
    Py_XDECREF(kept);
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* call(name, send, recv, op=None, root=-1, counts=None, stream=None): run a blocking call; `general` runs one that is
 * not in the table. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    repeater *r = (repeater *)self;
    signature of;
    void *addresses[SIDES];
    entry *e = read_call(r, args, n, &of, addresses) ? find(r, &of) : NULL;
    if (!e || e->busy) return fall_back(r, args, n);
    PyObject *held = Py_NewRef(e->held); /* another thread may clear the table */
    e->busy = 1;
    int state = run(e->native, addresses, r->timeout);
    if (e->held == held) {
        e->busy = 0;
        if (!state || state == FAILED) Py_XDECREF(take(e));
    }
    PyObject *result;
    if (state < 0) /* not started: the general way runs it or raises */
        result = fall_back(r, args, n);
    else
        result = state == DONE ? Py_NewRef(Py_None) : go_on(r, held, args[SEND], args[RECV]);
    Py_DECREF(held);
    return result;
}

/* keep(held, address of the program, name, send, recv, op, root): keep a program for such calls. Returns what it has
 * replaced, or `held` if the call cannot be kept, or None. */
static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    repeater *r = (repeater *)self;
    signature of;
    void *addresses[SIDES], *native = n == 2 + ROOT + 1 ? PyLong_AsVoidPtr(args[1]) : NULL;
    if (PyErr_Occurred()) return NULL;
    if (!native || !read_call(r, args + 2, n - 2, &of, addresses) || find(r, &of)) return Py_NewRef(args[0]);
    entry *at = places(r, &of), *e = NULL;
    for (int i = 0; i < PLACES && (!e || e->held); i++)
        if (!at[i].busy) e = &at[i];
    if (!e) Py_RETURN_NONE; /* all entries are in use: the program is not kept */
    PyObject *out = take(e);
    for (int i = 0; i < OBJECTS; i++)
        Py_XINCREF(of.objects[i]);
    *e = (entry){.of = of, .held = Py_NewRef(args[0]), .native = native};
    return out ? out : Py_NewRef(Py_None);
}

/* clear(): empty the table. */
static PyObject *clear(PyObject *self, PyObject *unused) {
    (void)unused;
    for (int i = 0; i < ENTRIES; i++)
        Py_XDECREF(take(&((repeater *)self)->entries[i]));
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static int set_up(PyObject *self, PyObject *args, PyObject *names) {
    repeater *r = (repeater *)self;
    (void)names;
    if (r->general) return 0; /* only once */
    if (!PyArg_ParseTuple(args, "OOOO", &r->general, &r->goes_on, &r->given_up, &r->in_place)) return -1;
    Py_INCREF(r->general);
    Py_INCREF(r->goes_on);
    Py_INCREF(r->given_up);
    Py_INCREF(r->in_place);
    return 0;
}

/* Objects that may be part of a reference cycle: the functions belong to the table's owner, like kinds and programs. */
static int traverse(PyObject *self, visitproc visit, void *arg) {
    repeater *r = (repeater *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->general);
    Py_VISIT(r->goes_on);
    Py_VISIT(r->given_up);
    for (int i = 0; i < ENTRIES; i++)
        Py_VISIT(r->entries[i].held);
    return 0;
}

static int let_go(PyObject *self) {
    repeater *r = (repeater *)self;
    Py_XDECREF(clear(self, NULL));
    Py_CLEAR(r->general);
    Py_CLEAR(r->goes_on);
    Py_CLEAR(r->given_up);
    Py_CLEAR(r->in_place);
    return 0;
}

static void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    let_go(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define METHOD(name, how) {#name, (PyCFunction)(void (*)(void))name, how, NULL}
static PyMethodDef methods[] = {
    METHOD(call, METH_FASTCALL), METHOD(keep, METH_FASTCALL), METHOD(clear, METH_NOARGS), {0}};
static PyMemberDef members[] = {{"timeout", T_DOUBLE, offsetof(repeater, timeout), 0, NULL}, {0}};
static PyType_Slot slots[] = {
    {Py_tp_init, set_up},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, let_go},
    {Py_tp_dealloc, end},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};
static PyType_Spec spec = {"ucc_hetero._repeat.Repeater", sizeof(repeater), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           slots};

/* arrays(type, sample, address, dtype): recognize arrays of this type if the sample shows the expected layout. */
static PyObject *arrays(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 4 || Py_TYPE(args[1]) != (PyTypeObject *)args[0]) Py_RETURN_FALSE;
    const array *a = (const array *)args[1];
    Py_ssize_t size = PyObject_Size(args[1]);
    if (a->data != PyLong_AsVoidPtr(args[2]) || a->dtype != args[3] || a->nd != 1 || a->dimensions[0] != size ||
        (a->flags & (CONTIGUOUS | WRITEABLE)) != CONTIGUOUS || PyErr_Occurred())
        Py_RETURN_FALSE;
    ndarray = (PyTypeObject *)Py_NewRef(args[0]);
    Py_RETURN_TRUE;
}

/* piece(peer, what, local, target, here, there, bytes, timeout): begin a put or get of one piece, given addresses of
 * engine objects. Returns 1 if it is complete, the transfer's address, or 0 if the general way has to do it or an
 * argument is wrong. */
static PyObject *piece(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    unsigned long long v[NUMBERS];
    (void)module;
    int fits = n == NUMBERS + 1;
    for (int i = 0; fits && i < NUMBERS; i++) {
        v[i] = PyLong_AsUnsignedLongLong(args[i]);
        fits = v[i] != (unsigned long long)-1; /* no number, or out of range */
    }
    double timeout = fits ? PyFloat_AsDouble(args[NUMBERS]) : -1;
    if (!fits || timeout == -1 || !v[PEER] || !v[LOCAL] || !v[TARGET]) {
        PyErr_Clear();
        return PyLong_FromLong(0);
    }
    ucch_peer *peer = (ucch_peer *)(uintptr_t)v[PEER];
    ucch_region *local = (ucch_region *)(uintptr_t)v[LOCAL];
    ucch_target *target = (ucch_target *)(uintptr_t)v[TARGET];
    uintptr_t found;
    /* With the GIL the engine's lock is only tried: its holder may be waiting for the GIL. */
    if (ucch_transfer_is_short(local, target, v[BYTES]) && ucch_trylock()) {
        found = ucch_transfer_piece(peer, (int)v[WHAT], local, target, v[HERE], v[THERE], v[BYTES], timeout);
        ucch_unlock();
    } else {
        Py_BEGIN_ALLOW_THREADS;
        found = ucch_transfer_piece(peer, (int)v[WHAT], local, target, v[HERE], v[THERE], v[BYTES], timeout);
        Py_END_ALLOW_THREADS;
    }
    return PyLong_FromUnsignedLongLong(found);
}

/* untrack(object): remove it from the garbage collector's list. */
static PyObject *untrack(PyObject *module, PyObject *object) {
    (void)module;
    PyObject_GC_UnTrack(object);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    METHOD(arrays, METH_FASTCALL), METHOD(piece, METH_FASTCALL), METHOD(untrack, METH_O), {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "ucc_hetero._repeat", .m_size = -1,
                                    .m_methods = functions};

PyMODINIT_FUNC PyInit__repeat(void);
PyMODINIT_FUNC PyInit__repeat(void) {
    PyObject *made = PyModule_Create(&module), *type = made ? PyType_FromSpec(&spec) : NULL;
    if (type && !PyModule_AddObject(made, "Repeater", type)) return made;
    Py_XDECREF(type);
    Py_XDECREF(made);
    return NULL;
}
#endif
