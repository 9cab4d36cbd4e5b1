/* Calls that were made before, and transfers of one piece, in one crossing from Python into C: the module
 * ucc_hetero._repeat, in the same file as cffi's module.
 *
 * Calls are told apart by pointers: the call's name, its operation, and for numpy arrays (whose struct is part of
 * numpy's ABI) the dtype and length; and by the numbers in counts and displacements. Everything else is handled in
 * Python. */
#include "python/python.h"
#ifndef Py_GIL_DISABLED

/* Entries of the table, and entries in which one call may be kept. */
#define ENTRIES 256
#define PLACES 4
/* Words that describe a call's counts, such as those of an alltoallw of 80 ranks. */
#define WORDS 512
/* Seconds to wait before Python checks for signals. */
#define SLICE 0.05
enum { NAME, SEND, RECV, OP, ROOT, COUNTS, STREAM };
enum { OUTOF, INTO, SIDES };
/* Objects that distinguish calls; the dtypes of both buffers come first. */
enum { BY_NAME = SIDES, BY_OP, BY_ROOT, OBJECTS };
/* Kinds of words in the description of counts and datatypes; IS_TYPE is followed by the address of a datatype. */
enum { IS_NONE, IS_NUMBER, IS_LIST, IS_LIST_OF_TYPES, IS_TUPLE, IS_TYPE };
enum { PEER, WHAT, LOCAL, TARGET, HERE, THERE, BYTES, NUMBERS };

/* What distinguishes calls. Its objects are kept alive, so that no other object gets their address. */
typedef struct signature {
    PyObject *objects[OBJECTS];
    Py_ssize_t sizes[SIDES], n; /* n: words */
} signature;

typedef struct entry {
    signature of;
    int64_t *words;
    PyObject *types;       /* a list of the datatypes whose addresses are among the words */
    PyObject *pool, *idle; /* pool of programs, and its list of idle ones; NULL: the entry is free */
    Py_ssize_t spare;      /* most programs in that list */
    /* If the ranks exchange counts first: (pool, program) of the exchange, what it needs, its program, where it sends
     * from and receives at, and the counts for which the pool's programs were made. */
    PyObject *exchange, *needs, *counts;
    ucch_program *first;
    void *rows[SIDES];
} entry;

typedef struct repeater {
    PyObject_HEAD;
    PyObject *functions, *in_place, *dropped; /* dropped: a container of calls that Python has to look at first */
    double timeout;
    Py_ssize_t active;
    entry entries[ENTRIES];
} repeater;

/* Functions of Python: the general forms of `call` and `start`, and parts of calls that have begun. */
enum { RUN, START, GO_ON, GIVE_UP, COUNTED, ADOPT, FILL };
/* What the request of a call keeps: the pool and its idle list, the program, and the caller's buffers. */
enum { POOL, IDLE, PROGRAM, FROM, TO };

PyTypeObject *ucch_ndarray;

static PyObject *integers[2];   /* numpy's types of int32 and int64 */
static PyObject *address_of_it; /* the name of a program's attribute */

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

/* Add an object. Python keeps only calls with objects that do not change, such as predefined datatypes. */
static int add_type(signature *of, int64_t *words, PyObject *type, PyObject *types) {
    return add(of, words, (intptr_t)type) && (!types || !PyList_Append(types, type));
}

static int describe_list(PyObject *list, signature *of, int64_t *words, PyObject *types) {
    Py_ssize_t n = PyList_Size(list);
    int overflow = 0, numbers = !n || Py_TYPE(PyList_GetItem(list, 0)) == &PyLong_Type;
    int fits = add(of, words, numbers ? IS_LIST : IS_LIST_OF_TYPES) && add(of, words, n);
    for (Py_ssize_t i = 0; fits && i < n; i++) {
        PyObject *each = PyList_GetItem(list, i);
        fits = numbers == (Py_TYPE(each) == &PyLong_Type) && Py_TYPE(each) != &PyList_Type &&
               Py_TYPE(each) != ucch_ndarray &&
               (numbers ? add(of, words, PyLong_AsLongLongAndOverflow(each, &overflow))
                        : add_type(of, words, each, types));
    }
    return fits && !overflow;
}

/* Describe counts, displacements, or what else may follow an array in its list. Datatypes are added to `types`, unless
 * that is NULL. */
static int describe_word(PyObject *word, signature *of, int64_t *words, PyObject *types) {
    int overflow = 0;
    if (word == Py_None) return add(of, words, IS_NONE);
    if (Py_TYPE(word) == ucch_ndarray) return add(of, words, IS_LIST) && add_array(of, words, (array *)word);
    if (Py_TYPE(word) == &PyLong_Type)
        return add(of, words, IS_NUMBER) && add(of, words, PyLong_AsLongLongAndOverflow(word, &overflow)) && !overflow;
    if (Py_TYPE(word) == &PyList_Type) return describe_list(word, of, words, types);
    if (Py_TYPE(word) != &PyTuple_Type) return add(of, words, IS_TYPE) && add_type(of, words, word, types);
    Py_ssize_t n = PyTuple_Size(word);
    int fits = add(of, words, IS_TUPLE) && add(of, words, n);
    for (Py_ssize_t i = 0; fits && i < n; i++)
        fits = describe_word(PyTuple_GetItem(word, i), of, words, types);
    return fits;
}

/* Describe one buffer of a call. Returns 0 if Python has to do it. */
static int describe_fast(const repeater *r, PyObject *given, int side, signature *of, int64_t *words, void **address,
                         PyObject *types) {
    of->objects[side] = NULL;
    of->sizes[side] = 0;
    *address = NULL;
    if (given == Py_None || given == r->in_place) return 1;
    if (Py_TYPE(given) == &PyList_Type || Py_TYPE(given) == &PyTuple_Type) {
        int is_list = Py_TYPE(given) == &PyList_Type;
        Py_ssize_t n = is_list ? PyList_Size(given) : PyTuple_Size(given);
        int fits = n > 1 && add(of, words, is_list);
        for (Py_ssize_t i = 1; fits && i < n; i++)
            fits = describe_word(is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i), of, words, types);
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
                     void **addresses, PyObject *types) {
    if (!ucch_ndarray || n < ROOT + 1 || (n > STREAM && args[STREAM] != Py_None)) return 0;
    of->objects[BY_NAME] = args[NAME];
    of->objects[BY_OP] = args[OP];
    of->objects[BY_ROOT] = args[ROOT];
    of->n = 0;
    return describe_fast(r, args[SEND], OUTOF, of, words, &addresses[OUTOF], types) &&
           describe_fast(r, args[RECV], INTO, of, words, &addresses[INTO], types) &&
           (n <= COUNTS || args[COUNTS] == Py_None || describe_word(args[COUNTS], of, words, types));
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
        if (at[i].pool && !memcmp(&at[i].of, of, sizeof(*of)) &&
            !memcmp(at[i].words, words, (size_t)of->n * sizeof(*words)))
            return &at[i];
    return NULL;
}

static void empty(entry *e) {
    entry gone = *e;
    memset(e, 0, sizeof(*e)); /* first: destructors may use the table */
    PyObject *all[] = {gone.types, gone.pool, gone.idle, gone.exchange, gone.needs, gone.counts};
    for (int i = 0; i < OBJECTS; i++)
        Py_XDECREF(gone.of.objects[i]);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        Py_XDECREF(all[i]);
    PyMem_Free(gone.words);
}

/* Take an idle program out of a list. NULL if all are in use. */
static PyObject *take(PyObject *idle, ucch_program **native) {
    Py_ssize_t n = PyList_Size(idle);
    if (n <= 0) return NULL;
    PyObject *program = Py_NewRef(PyList_GetItem(idle, n - 1)), *address = PyObject_GetAttr(program, address_of_it);
    *native = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (!*native || PyList_SetSlice(idle, n - 1, n, NULL)) Py_CLEAR(program);
    return program;
}

static void give_back(PyObject *idle, PyObject *program, Py_ssize_t spare) {
    if (PyList_Size(idle) < spare) PyList_Append(idle, program);
}

/* ---- calls ---- */

/* Run a program: briefly with the GIL, then without it. */
static int run(ucch_program *p, void *const *addresses, double timeout) {
    int state = ucch_program_try(p, addresses[OUTOF], addresses[INTO], timeout, 1);
    if (state == UCCH_LATER || !state) {
        Py_BEGIN_ALLOW_THREADS;
        state = state ? ucch_program_run(p, addresses[OUTOF], addresses[INTO], timeout, SLICE)
                      : ucch_wait(ucch_program_op(p), SLICE);
        Py_END_ALLOW_THREADS;
    }
    return state;
}

static PyObject *function(const repeater *r, int which) { return PyTuple_GetItem(r->functions, which); }

/* Call a function with `first`, of `more` objects, and then the arguments. */
static PyObject *in_general(const repeater *r, int which, PyObject *const *first, Py_ssize_t more,
                            PyObject *const *args, Py_ssize_t n) {
    PyObject *all = PyTuple_New(more + n);
    for (Py_ssize_t i = 0; all && i < more + n; i++)
        PyTuple_SetItem(all, i, Py_NewRef(i < more ? first[i] : args[i - more]));
    PyObject *result = all ? PyObject_CallObject(function(r, which), all) : NULL;
    Py_XDECREF(all);
    return result;
}

/* If an exception such as KeyboardInterrupt has ended the wait for a program, which may come before Python's first
 * line, keep alive what it uses. */
static PyObject *unless_given_up(const repeater *r, PyObject *result, PyObject *held, PyObject *one, PyObject *two) {
    PyObject *type, *value, *trace;
    if (result) return result;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *kept = PyObject_CallFunctionObjArgs(function(r, GIVE_UP), held, one, two, NULL);
    Py_XDECREF(kept);
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* Wait for a call that is still active, or raise its error. */
static PyObject *go_on(const repeater *r, const entry *e, PyObject *program, PyObject *send, PyObject *recv) {
    PyObject *held = PyTuple_Pack(2, e->pool, program);
    PyObject *result = held ? PyObject_CallFunctionObjArgs(function(r, GO_ON), held, send, recv, NULL) : NULL;
    result = held ? unless_given_up(r, result, held, send, recv) : NULL;
    Py_XDECREF(held);
    return result;
}

/* The counts of this call may not be those of the entry, or their exchange (in this state) has not ended: go on in
 * Python. */
static PyObject *go_on_counted(const repeater *r, const entry *e, int state, PyObject *const *args, Py_ssize_t n) {
    PyObject *first[] = {e->pool, PyLong_FromLong(state)};
    PyObject *result = first[1] ? in_general(r, COUNTED, first, 2, args, n) : NULL;
    Py_XDECREF(first[1]);
    return unless_given_up(r, result, e->exchange, e->needs, NULL);
}

/* Run the exchange of counts. Returns 1 if they are those of the entry, else 0; `state` is that of the exchange. */
static int same_counts(const repeater *r, const entry *e, int *state) {
    *state = run(e->first, e->rows, r->timeout);
    return *state == DONE && !memcmp(e->rows[INTO], PyBytes_AsString(e->counts), (size_t)PyBytes_Size(e->counts));
}

/* Run a blocking call. NULL without an exception if the general way has to do it. */
static PyObject *run_call(repeater *r, PyObject *const *args, Py_ssize_t n) {
    signature of;
    int64_t words[WORDS];
    void *addresses[SIDES];
    ucch_program *native;
    entry *e = read_call(r, args, n, &of, words, addresses, NULL) ? find(r, &of, words) : NULL;
    PyObject *program = e ? take(e->idle, &native) : NULL, *result = NULL;
    if (!program) return NULL;
    entry mine = *e; /* another thread may clear the table */
    PyObject *all[] = {mine.pool, mine.idle, mine.exchange, mine.needs, mine.counts};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        Py_XINCREF(all[i]);
    int before = DONE, same = !mine.first || same_counts(r, &mine, &before);
    int state = same ? run(native, addresses, r->timeout) : before;
    if (!same || state < 0 || state == DONE) give_back(mine.idle, program, mine.spare);
    if (state == DONE && same)
        result = Py_NewRef(Py_None);
    else if (same && state >= 0)
        result = go_on(r, &mine, program, args[SEND], args[RECV]);
    else if (mine.first && before >= 0)
        result = go_on_counted(r, &mine, before, args, n); /* else not started: the general way runs it or raises */
    Py_DECREF(program);
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        Py_XDECREF(all[i]);
    return result;
}

/* call(name, send, recv, op=None, root=-1, counts=None, stream=None): run a blocking call. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    PyObject *result = run_call((repeater *)self, args, n);
    return result || PyErr_Occurred() ? result : in_general((repeater *)self, RUN, NULL, 0, args, n);
}

/* attempt(name, send, recv, op, root): as call, but return True; False if the caller has to do it. */
static PyObject *attempt(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    PyObject *result = run_call((repeater *)self, args, n);
    if (!result) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    Py_DECREF(result);
    Py_RETURN_TRUE;
}

/* ---- requests of calls ---- */

static PyObject *fill(posted *q, PyObject *status, int state) {
    (void)state;
    PyObject *filled = PyObject_CallFunctionObjArgs(function((repeater *)q->by, FILL), status, NULL);
    Py_XDECREF(filled);
    return filled ? Py_NewRef(Py_True) : NULL;
}

static void end_call(posted *q) { give_back(q->kept[IDLE], q->kept[PROGRAM], q->spare); }

static PyObject *adopt(posted *q) {
    if (!q->owner) q->owner = Py_NewRef(q->kept[PROGRAM]);
    return PyObject_CallFunctionObjArgs(function((repeater *)q->by, ADOPT), q, q->kept[POOL], q->owner, q->kept[FROM],
                                        q->kept[TO], NULL);
}

static const posted_kind of_call = {fill, end_call, adopt};

/* The request of a call of an entry that is about to begin. NULL if all its programs are in use, or with an
 * exception. */
static posted *request_of(repeater *r, const entry *e, PyObject *const *args) {
    ucch_program *native;
    PyObject *program = take(e->idle, &native);
    posted *q = program ? ucch_posted_new(&of_call, (PyObject *)r, &r->active, ucch_program_op(native), 0) : NULL;
    if (q) {
        PyObject *kept[] = {e->pool, e->idle, program, args[SEND], args[RECV]};
        for (int i = 0; i < KEPT; i++)
            q->kept[i] = Py_NewRef(kept[i]);
        q->spare = e->spare;
    }
    Py_XDECREF(program);
    return q;
}

/* start(name, send, recv, op=None, root=-1, counts=None, stream=None): begin a call. Returns its request. */
static PyObject *start(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    repeater *r = (repeater *)self;
    signature of;
    int64_t words[WORDS];
    void *addresses[SIDES];
    entry *e = read_call(r, args, n, &of, words, addresses, NULL) ? find(r, &of, words) : NULL;
    posted *q = e && !e->first && !PyObject_Size(r->dropped) ? request_of(r, e, args) : NULL;
    if (!q) return PyErr_Occurred() ? NULL : in_general(r, START, NULL, 0, args, n);
    ucch_program *native = (ucch_program *)q->op;
    int state = ucch_program_try(native, addresses[OUTOF], addresses[INTO], r->timeout, 0);
    if (state == UCCH_LATER) {
        Py_BEGIN_ALLOW_THREADS;
        ucch_progress_thread(1);
        state = ucch_program_start(native, addresses[OUTOF], addresses[INTO], r->timeout);
        Py_END_ALLOW_THREADS;
    }
    if (state >= 0) return (PyObject *)q;
    end_call(q); /* not started: the general way does it or raises */
    ucch_posted_forget(q);
    Py_DECREF(q);
    return in_general(r, START, NULL, 0, args, n);
}

/* ---- the table ---- */

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

/* keep(pool, its idle programs, the most of them, exchange, name, send, recv, op, root, counts): keep a pool for such
 * calls. */
static PyObject *keep(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    repeater *r = (repeater *)self;
    int64_t words[WORDS];
    entry made = {.types = PyList_New(0)}, *e = NULL;
    signature *of = &made.of;
    void *addresses[SIDES];
    if (made.types && n == 4 + COUNTS + 1 && PyList_Check(args[1]) &&
        read_call(r, args + 4, n - 4, of, words, addresses, made.types))
        e = find(r, of, words);
    else
        memset(of, 0, sizeof(*of)); /* its objects are borrowed */
    int known = e != NULL, same = known && e->pool == args[0];
    entry *at = of->objects[BY_NAME] ? places(r, of, words) : NULL;
    for (int i = 0; at && !known && i < PLACES && (!e || e->pool); i++)
        if (!e || !at[i].pool) e = &at[i];
    for (int i = 0; i < OBJECTS; i++)
        Py_XINCREF(of->objects[i]);
    if (e && !same) made.words = PyMem_Calloc((size_t)of->n + 1, sizeof(*words));
    if (made.words && note_exchange(&made, args[3])) {
        memcpy(made.words, words, (size_t)of->n * sizeof(*words));
        made.spare = PyLong_AsSsize_t(args[2]);
        made.pool = Py_NewRef(args[0]);
        made.idle = Py_NewRef(args[1]);
        entry out = *e;
        *e = made;
        made = out;
    }
    empty(&made);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* clear(): empty the table. */
static PyObject *clear(PyObject *self, PyObject *unused) {
    (void)unused;
    for (int i = 0; i < ENTRIES; i++)
        empty(&((repeater *)self)->entries[i]);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static int set_up(PyObject *self, PyObject *args, PyObject *names) {
    repeater *r = (repeater *)self;
    (void)names;
    if (r->functions) return 0; /* only once */
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &r->functions, &r->in_place, &r->dropped)) return -1;
    Py_INCREF(r->functions);
    Py_INCREF(r->in_place);
    Py_INCREF(r->dropped);
    return 0;
}

/* Objects that may be part of a reference cycle: the functions belong to the table's owner, like kinds and programs. */
static int traverse(PyObject *self, visitproc visit, void *arg) {
    repeater *r = (repeater *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->functions);
    for (int i = 0; i < ENTRIES; i++) {
        Py_VISIT(r->entries[i].types);
        Py_VISIT(r->entries[i].pool);
        Py_VISIT(r->entries[i].idle);
        Py_VISIT(r->entries[i].exchange);
        Py_VISIT(r->entries[i].needs);
    }
    return 0;
}

static int let_go(PyObject *self) {
    repeater *r = (repeater *)self;
    Py_XDECREF(clear(self, NULL));
    Py_CLEAR(r->functions);
    Py_CLEAR(r->in_place);
    Py_CLEAR(r->dropped);
    return 0;
}

static void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    let_go(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {METHOD(call, METH_FASTCALL),  METHOD(attempt, METH_FASTCALL),
                                METHOD(start, METH_FASTCALL), METHOD(keep, METH_FASTCALL),
                                METHOD(clear, METH_NOARGS),   {0}};
static PyMemberDef members[] = {{"timeout", T_DOUBLE, offsetof(repeater, timeout), 0, NULL},
                                {"active", T_PYSSIZET, offsetof(repeater, active), READONLY, NULL},
                                {0}};
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
    if (!address_of_it) address_of_it = PyUnicode_InternFromString("address");
    if (address_of_it && type && !PyModule_AddObject(made, "Repeater", type) && !ucch_add_messages(made)) return made;
    Py_XDECREF(type);
    Py_XDECREF(made);
    return NULL;
}
#endif
