/* Blocking calls that were made before, and transfers of one piece, from Python to completion in one crossing into C:
 * the module ucc_hetero._repeat, in the same file as cffi's module.
 *
 * Calls are told apart by pointers: the call's name, its operation, and for numpy arrays (whose struct is part of
 * numpy's ABI) the dtype and length; and by the numbers in counts and displacements. Everything else is handled in
 * Python. */
#include "python/python.h"
#ifndef Py_GIL_DISABLED

/* Entries of the table, and entries in which one call may be kept. */
#define ENTRIES 256
#define PLACES 4
/* Words that describe a call's counts, such as those of an alltoallv with displacements of 24 ranks. */
#define WORDS 128
/* Seconds to wait before Python checks for signals. */
#define SLICE 0.05
enum { NAME, SEND, RECV, OP, ROOT, COUNTS, STREAM };
enum { OUTOF, INTO, SIDES };
/* Objects that distinguish calls; the dtypes of both buffers come first. BY_TYPE: the datatypes beside them. */
enum { BY_NAME = SIDES, BY_OP, BY_ROOT, BY_TYPE, OBJECTS = BY_TYPE + SIDES };
/* Kinds of words in the description of counts. */
enum { IS_NONE, IS_NUMBER, IS_LIST, IS_TUPLE, IS_TYPE };
enum { PEER, WHAT, LOCAL, TARGET, HERE, THERE, BYTES, NUMBERS };
/* Results of ucch_wait; 0: still active. */
enum { DONE = 1, FAILED };

/* What distinguishes calls. Its objects are kept alive, so that no other object gets their address. */
typedef struct signature {
    PyObject *objects[OBJECTS];
    Py_ssize_t sizes[SIDES], n; /* n: words */
} signature;

typedef struct entry {
    signature of;
    int64_t *words;
    PyObject *held; /* (pool, program); NULL: the entry is free */
    ucch_program *native;
    /* If the ranks exchange counts first: (pool, program) of the exchange, what it needs, its program, where it sends
     * from and receives at, and the counts for which `native` was made. */
    PyObject *exchange, *needs, *counts;
    ucch_program *first;
    void *rows[SIDES];
    int busy; /* its program is in use by another thread */
} entry;

typedef struct repeater {
    PyObject_HEAD;
    PyObject *general, *goes_on, *given_up, *counted, *in_place;
    double timeout;
    entry entries[ENTRIES];
} repeater;

PyTypeObject *ucch_ndarray;

static PyObject *integers[2]; /* numpy's types of int32 and int64 */

/* ---- signatures ---- */

static int add(signature *of, int64_t *words, int64_t word) {
    if (of->n == WORDS) return 0;
    words[of->n++] = word;
    return 1;
}

static int add_array(signature *of, int64_t *words, const array *a) {
    int is_long = a->dtype == integers[1], known = is_long || a->dtype == integers[0];
    if (!known || a->nd != 1 || !(a->flags & CONTIGUOUS)) return 0;
    int fits = add(of, words, a->dimensions[0]);
    for (Py_ssize_t i = 0; fits && i < a->dimensions[0]; i++)
        fits = add(of, words, is_long ? ((int64_t *)a->data)[i] : ((int32_t *)a->data)[i]);
    return fits;
}

/* Describe counts, displacements, or what else may follow an array in its list: an object at `type`. Python keeps only
 * calls with objects that do not change, such as predefined datatypes. */
static int describe_word(PyObject *word, signature *of, int64_t *words, PyObject **type) {
    int is_list = Py_TYPE(word) == &PyList_Type, overflow = 0;
    if (word == Py_None) return add(of, words, IS_NONE);
    if (Py_TYPE(word) == ucch_ndarray) return add(of, words, IS_LIST) && add_array(of, words, (array *)word);
    if (Py_TYPE(word) == &PyLong_Type)
        return add(of, words, IS_NUMBER) && add(of, words, PyLong_AsLongLongAndOverflow(word, &overflow)) && !overflow;
    if (is_list || Py_TYPE(word) == &PyTuple_Type) {
        Py_ssize_t n = is_list ? PyList_Size(word) : PyTuple_Size(word);
        int fits = add(of, words, is_list ? IS_LIST : IS_TUPLE) && add(of, words, n);
        for (Py_ssize_t i = 0; fits && i < n; i++) {
            PyObject *each = is_list ? PyList_GetItem(word, i) : PyTuple_GetItem(word, i);
            fits = Py_TYPE(each) == &PyLong_Type && is_list
                       ? add(of, words, PyLong_AsLongLongAndOverflow(each, &overflow))
                       : !is_list && describe_word(each, of, words, type);
        }
        return fits && !overflow;
    }
    if (!type || *type) return 0;
    *type = word;
    return add(of, words, IS_TYPE);
}

/* Describe one buffer of a call. Returns 0 if Python has to do it. */
static int describe_fast(const repeater *r, PyObject *given, int side, signature *of, int64_t *words, void **address) {
    of->objects[side] = of->objects[BY_TYPE + side] = NULL;
    of->sizes[side] = 0;
    *address = NULL;
    if (given == Py_None || given == r->in_place) return 1;
    if (Py_TYPE(given) == &PyList_Type || Py_TYPE(given) == &PyTuple_Type) {
        int is_list = Py_TYPE(given) == &PyList_Type;
        Py_ssize_t n = is_list ? PyList_Size(given) : PyTuple_Size(given);
        int fits = n > 1 && add(of, words, is_list);
        for (Py_ssize_t i = 1; fits && i < n; i++)
            fits = describe_word(is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i), of, words,
                                 &of->objects[BY_TYPE + side]);
        if (!fits) return 0;
        given = is_list ? PyList_GetItem(given, 0) : PyTuple_GetItem(given, 0);
    }
    if (Py_TYPE(given) != ucch_ndarray) return 0;
    const array *a = (const array *)given;
    int due = side == INTO ? CONTIGUOUS | WRITEABLE : CONTIGUOUS;
    of->objects[side] = a->dtype;
    of->sizes[side] = elements(a);
    *address = a->data;
    return (a->flags & due) == due;
}

/* Find a call's signature. Returns 0 if it has none. */
static int read_call(const repeater *r, PyObject *const *args, Py_ssize_t n, signature *of, int64_t *words,
                     void **addresses) {
    if (!ucch_ndarray || n < ROOT + 1 || (n > STREAM && args[STREAM] != Py_None)) return 0;
    of->objects[BY_NAME] = args[NAME];
    of->objects[BY_OP] = args[OP];
    of->objects[BY_ROOT] = args[ROOT];
    of->n = 0;
    return describe_fast(r, args[SEND], OUTOF, of, words, &addresses[OUTOF]) &&
           describe_fast(r, args[RECV], INTO, of, words, &addresses[INTO]) &&
           (n <= COUNTS || args[COUNTS] == Py_None || describe_word(args[COUNTS], of, words, NULL));
}

/* The first of the PLACES entries in which this call may be kept. */
static entry *places(repeater *r, const signature *of, const int64_t *words) {
    static const uintptr_t weights[OBJECTS] = {[INTO] = 1, [BY_NAME] = 31, [BY_OP] = 7, [BY_ROOT] = 3};
    uintptr_t mixed = (uintptr_t)(of->sizes[OUTOF] * 5 + of->sizes[INTO]);
    for (int i = 0; i < OBJECTS; i++)
        mixed += (uintptr_t)of->objects[i] / 16 * weights[i];
    for (Py_ssize_t i = 0; i < of->n; i++)
        mixed = mixed * 33 + (uintptr_t)words[i];
    return &r->entries[(mixed ^ mixed >> 7) % (ENTRIES / PLACES) * PLACES];
}

static entry *find(repeater *r, const signature *of, const int64_t *words) {
    entry *at = places(r, of, words);
    for (int i = 0; i < PLACES; i++)
        if (at[i].held && !memcmp(&at[i].of, of, sizeof(*of)) &&
            !memcmp(at[i].words, words, (size_t)of->n * sizeof(*words)))
            return &at[i];
    return NULL;
}

/* Empty an entry. Returns its `held`, which the caller has to release, or NULL. */
static PyObject *take(entry *e) {
    entry gone = *e;
    memset(e, 0, sizeof(*e)); /* first: destructors may use the table */
    for (int i = 0; i < OBJECTS; i++)
        Py_XDECREF(gone.of.objects[i]);
    Py_XDECREF(gone.exchange);
    Py_XDECREF(gone.needs);
    Py_XDECREF(gone.counts);
    PyMem_Free(gone.words);
    return gone.held;
}

/* ---- calls ---- */

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

/* The counts of this call may not be those of the entry, or their exchange (in this state) has not ended: go on in
 * Python. */
static PyObject *go_on_counted(const repeater *r, const entry *e, int state, PyObject *const *args, Py_ssize_t n) {
    PyObject *all = PyTuple_New(n + 2), *type, *value, *trace, *number = PyLong_FromLong(state);
    if (!all || !number) return NULL;
    PyTuple_SetItem(all, 0, Py_NewRef(e->held));
    PyTuple_SetItem(all, 1, number);
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SetItem(all, i + 2, Py_NewRef(args[i]));
    PyObject *result = PyObject_CallObject(r->counted, all);
    Py_DECREF(all);
    if (result) return result;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *kept = PyObject_CallFunctionObjArgs(r->given_up, e->exchange, e->needs, NULL);
    Py_XDECREF(kept);
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* Run the exchange of counts. Returns 1 if they are those of the entry, else 0; `state` is that of the exchange. */
static int same_counts(const repeater *r, const entry *e, int *state) {
    *state = run(e->first, e->rows, r->timeout);
    return *state == DONE && !memcmp(e->rows[INTO], PyBytes_AsString(e->counts), (size_t)PyBytes_Size(e->counts));
}

/* Run a blocking call; `general` does it if the call is not in the table or cannot start. */
static PyObject *run_call(repeater *r, PyObject *const *args, Py_ssize_t n,
                          PyObject *(*general)(const repeater *, PyObject *const *, Py_ssize_t)) {
    signature of;
    int64_t words[WORDS];
    void *addresses[SIDES];
    entry *e = read_call(r, args, n, &of, words, addresses) ? find(r, &of, words) : NULL;
    if (!e || e->busy) return general(r, args, n);
    PyObject *held = Py_NewRef(e->held); /* another thread may clear the table */
    entry mine = *e;
    Py_XINCREF(mine.exchange);
    Py_XINCREF(mine.needs);
    Py_XINCREF(mine.counts);
    e->busy = 1;
    int before = DONE, same = !mine.first || same_counts(r, &mine, &before);
    int state = same ? run(mine.native, addresses, r->timeout) : before;
    if (e->held == held) {
        e->busy = 0;
        if (!same || !state || state == FAILED || (state < 0 && mine.first)) Py_XDECREF(take(e));
    }
    PyObject *result;
    if (before < 0 || (state < 0 && !mine.first)) /* not started: the general way runs it or raises */
        result = general(r, args, n);
    else if (!same || state < 0)
        result = go_on_counted(r, &mine, before, args, n);
    else
        result = state == DONE ? Py_NewRef(Py_None) : go_on(r, held, args[SEND], args[RECV]);
    Py_DECREF(held);
    Py_XDECREF(mine.exchange);
    Py_XDECREF(mine.needs);
    Py_XDECREF(mine.counts);
    return result;
}

/* call(name, send, recv, op=None, root=-1, counts=None, stream=None): run a blocking call. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return run_call((repeater *)self, args, n, fall_back);
}

static PyObject *nothing(const repeater *r, PyObject *const *args, Py_ssize_t n) {
    (void)r, (void)args, (void)n;
    return Py_NewRef(Py_False);
}

/* attempt(name, send, recv, op, root): as call; False if the caller has to do it. */
static PyObject *attempt(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    PyObject *result = run_call((repeater *)self, args, n, nothing);
    if (result != Py_None) return result;
    Py_DECREF(result);
    Py_RETURN_TRUE;
}

/* Note the exchange of counts before a call: (address of its program, of what it sends and receives, counts, its pool
 * and program, what it needs). */
static int note_exchange(entry *e, PyObject *given) {
    PyObject *counts, *exchange, *needs;
    unsigned long long first, mine, rows;
    if (given == Py_None) return 1;
    if (!PyArg_ParseTuple(given, "KKKO!OO", &first, &mine, &rows, &PyBytes_Type, &counts, &exchange, &needs)) return 0;
    e->first = (ucch_program *)(uintptr_t)first;
    e->rows[OUTOF] = (void *)(uintptr_t)mine;
    e->rows[INTO] = (void *)(uintptr_t)rows;
    e->counts = Py_NewRef(counts);
    e->exchange = Py_NewRef(exchange);
    e->needs = Py_NewRef(needs);
    return 1;
}

/* keep(held, address of the program, exchange, name, send, recv, op, root, counts): keep a program for such calls.
 * Returns what it has replaced, or `held` if the call cannot be kept, or None. */
static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    repeater *r = (repeater *)self;
    signature of;
    int64_t words[WORDS];
    entry made = {0};
    void *addresses[SIDES], *native = n == 3 + COUNTS + 1 ? PyLong_AsVoidPtr(args[1]) : NULL;
    if (PyErr_Occurred()) return NULL;
    if (!native || !read_call(r, args + 3, n - 3, &of, words, addresses) || find(r, &of, words))
        return Py_NewRef(args[0]);
    entry *at = places(r, &of, words), *e = NULL;
    for (int i = 0; i < PLACES && (!e || e->held); i++)
        if (!at[i].busy) e = &at[i];
    if (!e) Py_RETURN_NONE; /* all entries are in use: the program is not kept */
    if (!(made.words = PyMem_Calloc((size_t)of.n + 1, sizeof(*words)))) return PyErr_NoMemory();
    memcpy(made.words, words, (size_t)of.n * sizeof(*words));
    if (!note_exchange(&made, args[2])) {
        PyMem_Free(made.words);
        return NULL;
    }
    PyObject *out = take(e);
    for (int i = 0; i < OBJECTS; i++)
        Py_XINCREF(of.objects[i]);
    made.of = of;
    made.held = Py_NewRef(args[0]);
    made.native = native;
    *e = made;
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
    if (!PyArg_ParseTuple(args, "OOOOO", &r->general, &r->goes_on, &r->given_up, &r->counted, &r->in_place)) return -1;
    Py_INCREF(r->general);
    Py_INCREF(r->goes_on);
    Py_INCREF(r->given_up);
    Py_INCREF(r->counted);
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
    Py_VISIT(r->counted);
    for (int i = 0; i < ENTRIES; i++) {
        Py_VISIT(r->entries[i].held);
        Py_VISIT(r->entries[i].exchange);
        Py_VISIT(r->entries[i].needs);
    }
    return 0;
}

static int let_go(PyObject *self) {
    repeater *r = (repeater *)self;
    Py_XDECREF(clear(self, NULL));
    Py_CLEAR(r->general);
    Py_CLEAR(r->goes_on);
    Py_CLEAR(r->given_up);
    Py_CLEAR(r->counted);
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

static PyMethodDef methods[] = {METHOD(call, METH_FASTCALL),
                                METHOD(attempt, METH_FASTCALL),
                                METHOD(keep, METH_FASTCALL),
                                METHOD(clear, METH_NOARGS),
                                {0}};
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

/* arrays(type, sample, address, dtype, int32, int64): recognize arrays of this type if the sample shows the expected
 * layout; counts may be arrays of the two types. */
static PyObject *arrays(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 6 || Py_TYPE(args[1]) != (PyTypeObject *)args[0]) Py_RETURN_FALSE;
    const array *a = (const array *)args[1];
    Py_ssize_t size = PyObject_Size(args[1]);
    if (a->data != PyLong_AsVoidPtr(args[2]) || a->dtype != args[3] || a->nd != 1 || a->dimensions[0] != size ||
        (a->flags & (CONTIGUOUS | WRITEABLE)) != CONTIGUOUS || PyErr_Occurred())
        Py_RETURN_FALSE;
    ucch_ndarray = (PyTypeObject *)Py_NewRef(args[0]);
    integers[0] = Py_NewRef(args[4]);
    integers[1] = Py_NewRef(args[5]);
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
    if (type && !PyModule_AddObject(made, "Repeater", type) && !ucch_add_messages(made)) return made;
    Py_XDECREF(type);
    Py_XDECREF(made);
    return NULL;
}
#endif
