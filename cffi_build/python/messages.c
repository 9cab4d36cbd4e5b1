/* Messages of numpy arrays in host memory, from Python to libucp in one crossing into C: the type Messenger
 * (ucc_hetero/p2p/quick.py).
 *
 * Arguments that are not plain, messages that take long and errors are left to Python. */
#include "python/python.h"
#ifndef Py_GIL_DISABLED
#include <limits.h>

#include "p2p/p2p.h"

/* Element types that are known to be plain. */
#define TYPES 32
/* A blocking call sends, receives, or does both. */
#define SIDES 2

/* Functions of Python; the first do in general what the methods of these names do for plain arguments. */
enum { SEND, RECV, ISEND, IRECV, SENDRECV, PROBE, IPROBE, OBJECT, GENERAL };
enum { FILL = GENERAL, GO_ON, GIVE_UP, ADOPT, POLL };

/* Rounds of progress with the GIL in a probe that waits, and seconds without it before Python looks for an object. */
#define ROUNDS 32
#define POLL_S 100e-6

typedef struct messenger {
    PyObject_HEAD;
    PyObject *functions;
    PyObject *queues; /* containers; messages are left to Python unless all are empty */
    ucp_worker_h worker;
    ucch_board *board;
    uint64_t base, mask; /* bits of the communicator in a tag */
    int rank, size, any_source, any_tag;
    ucp_ep_h *endpoints; /* by rank; NULL: not known yet */
    int *slots;          /* of the arrival board, by rank; the last is for any source */
    PyObject *types[TYPES];
    Py_ssize_t itemsize[TYPES];
    double timeout;
    Py_ssize_t active;
} messenger;

/* A message by its arguments. `peer` is the number of ranks for any source. */
typedef struct part {
    PyObject *array;
    void *data;
    size_t bytes;
    int peer, tag, receives;
} part;

static PyObject *function(const messenger *r, int which) { return PyTuple_GetItem(r->functions, which); }

static PyObject *fall_back(const messenger *r, int which, PyObject *const *args, Py_ssize_t n) {
    PyObject *all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; i++)
        PyTuple_SetItem(all, i, Py_NewRef(args[i]));
    PyObject *result = all ? PyObject_CallObject(function(r, which), all) : NULL;
    Py_XDECREF(all);
    return result;
}

/* ---- arguments ---- */

/* Read a number; None means `any`. Returns 0 if Python has to do it. */
static int number(PyObject *given, int any, int *found) {
    int overflow = 0;
    long value = given == Py_None                 ? any
                 : Py_TYPE(given) == &PyLong_Type ? PyLong_AsLongAndOverflow(given, &overflow)
                                                  : INT_MIN;
    *found = (int)value;
    return !overflow && value > INT_MIN && value <= INT_MAX;
}

static Py_ssize_t itemsize(const messenger *r, const PyObject *type) {
    for (int i = 0; i < TYPES && r->types[i]; i++)
        if (r->types[i] == type) return r->itemsize[i];
    return 0;
}

/* Read peer and tag. Returns 0 if Python has to do it. */
static int read_place(const messenger *r, PyObject *peer, PyObject *tag, int receives, part *p) {
    if (!number(peer, r->any_source, &p->peer) || !number(tag, r->any_tag, &p->tag)) return 0;
    int any_source = receives && p->peer == r->any_source, any_tag = receives && p->tag == r->any_tag;
    if (any_source) p->peer = r->size;
    if (any_tag) p->tag = -1;
    p->receives = receives;
    return (any_source || (p->peer >= 0 && p->peer < r->size)) && (any_tag || p->tag >= 0) &&
           (receives || r->endpoints[p->peer]);
}

/* Read array, peer and tag. Returns 0 if Python has to do it. */
static int read_part(const messenger *r, PyObject *const *args, int receives, part *p) {
    const array *a = (const array *)args[0];
    int due = receives ? CONTIGUOUS | WRITEABLE : CONTIGUOUS;
    if (Py_TYPE(args[0]) != ucch_ndarray || (a->flags & due) != due) return 0;
    Py_ssize_t size = itemsize(r, a->dtype);
    p->array = args[0];
    p->data = a->data;
    p->bytes = (size_t)(size * elements(a));
    return size && read_place(r, args[1], args[2], receives, p);
}

/* True if nothing but these messages has to be looked at. */
static int is_plain(const messenger *r, PyObject *stream) {
    if (stream != Py_None || ucch_board_broken(r->board)) return 0;
    Py_ssize_t n = PyTuple_Size(r->queues), waiting = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        waiting += PyObject_Size(PyTuple_GetItem(r->queues, i));
    return !waiting;
}

/* ---- begin ---- */

static ucch_op *op_of(ucch_message *m) { return ucch_message_op(m); }

/* The tag that a receive or probe matches. Returns its mask. */
static uint64_t pattern(const messenger *r, const part *p, uint64_t *tag) {
    uint64_t mask = r->mask;
    *tag = r->base;
    if (p->peer < r->size) {
        *tag |= (uint64_t)p->peer << UCCH_SOURCE_BIT;
        mask |= OWN_TAG - 1 - USER_TAG;
    }
    if (p->tag >= 0) {
        *tag |= (uint64_t)p->tag;
        mask |= USER_TAG;
    }
    return mask;
}

static void begin_locked(const messenger *r, const part *p, ucch_message *m, double timeout) {
    uint64_t tag = r->base | (uint64_t)r->rank << UCCH_SOURCE_BIT | (uint64_t)p->tag;
    ucch_message_watch(m, r->board, r->slots[p->peer], p->peer == r->size ? -1 : p->peer);
    if (p->receives) {
        uint64_t mask = pattern(r, p, &tag);
        ucch_recv(m, r->worker, p->data, p->bytes, tag, mask, UCS_MEMORY_TYPE_HOST, timeout);
    } else
        ucch_send(m, r->worker, r->endpoints[p->peer], p->data, p->bytes, tag, UCS_MEMORY_TYPE_HOST, 0, timeout);
}

/* Begin messages in order, and wait for them briefly; or wake the progress thread if one is not complete. */
static void begin_all_locked(const messenger *r, const part *parts, ucch_message **m, int n, int waits) {
    int active = 0;
    for (int i = 0; i < n; i++)
        begin_locked(r, &parts[i], m[i], waits ? r->timeout : 0);
    for (int i = 0; i < n; i++) {
        if (waits) ucch_wait_briefly_locked(op_of(m[i]));
        active |= !ucch_peek(op_of(m[i]));
    }
    if (active && !waits) ucch_progress_thread(1);
}

/* Make and begin messages. With the GIL the engine's lock is only tried: its holder may be waiting for the GIL. Returns
 * 0 with an exception if no memory is left. */
static int begin(const messenger *r, const part *parts, ucch_message **m, int n, int waits) {
    for (int i = 0; i < n; i++)
        if (!(m[i] = ucch_message_new())) {
            while (i--)
                ucch_message_free(m[i]);
            PyErr_NoMemory();
            return 0;
        }
    if (ucch_trylock()) {
        begin_all_locked(r, parts, m, n, waits);
        ucch_unlock();
    } else {
        Py_BEGIN_ALLOW_THREADS;
        ucch_lock();
        begin_all_locked(r, parts, m, n, waits);
        ucch_unlock();
        Py_END_ALLOW_THREADS;
    }
    return 1;
}

static ucch_message *message_of(const posted *q) { return (ucch_message *)q->op; }

static const posted_kind of_message;

/* The request of a message. That of a send that has ended at once is freed at once. */
static PyObject *request_of(messenger *r, const part *p, ucch_message *m) {
    posted *q = ucch_posted_new(&of_message, (PyObject *)r, &r->active, op_of(m), r->timeout);
    if (!q) return NULL; /* libucp may use message and array: they are not freed */
    q->peer = p->peer == r->size ? r->any_source : p->peer;
    q->tag = p->tag < 0 ? r->any_tag : p->tag;
    q->receives = p->receives;
    q->kept[0] = Py_NewRef(p->array);
    if (!p->receives && ucch_peek(op_of(m)) == DONE) {
        ucch_message_free(m);
        q->op = NULL;
    }
    return (PyObject *)q;
}

/* ---- end ---- */

/* Fill a status, unless it is None. `info` is NULL for a send. */
static PyObject *fill(const messenger *r, PyObject *status, const ucp_tag_recv_info_t *info) {
    if (status == Py_None) Py_RETURN_TRUE;
    int source = info ? (int)((info->sender_tag & (OWN_TAG - 1)) >> UCCH_SOURCE_BIT) : r->any_source;
    int tag = info ? (int)(info->sender_tag & USER_TAG) : r->any_tag;
    PyObject *filled = PyObject_CallFunction(function(r, FILL), "Oiin", status, source, tag,
                                             info ? (Py_ssize_t)info->length : (Py_ssize_t)0);
    Py_XDECREF(filled);
    return filled ? Py_NewRef(Py_True) : NULL;
}

/* Wait for messages of a blocking call in Python, which raises errors. If an exception such as KeyboardInterrupt ends
 * that wait, which may come before its first line, the messages are given up. */
static PyObject *go_on(messenger *r, const part *parts, ucch_message **m, int n, PyObject *status) {
    PyObject *all = PyTuple_New(n), *type, *value, *trace;
    for (int i = 0; all && i < n; i++) {
        PyObject *each = request_of(r, &parts[i], m[i]);
        if (!each)
            Py_CLEAR(all);
        else
            PyTuple_SetItem(all, i, each);
    }
    if (!all) return NULL;
    PyObject *result = PyObject_CallFunctionObjArgs(function(r, GO_ON), all, status, NULL);
    if (!result) {
        PyErr_Fetch(&type, &value, &trace);
        Py_XDECREF(PyObject_CallFunctionObjArgs(function(r, GIVE_UP), all, NULL));
        PyErr_Restore(type, value, trace);
    }
    Py_DECREF(all);
    return result;
}

static PyObject *block(messenger *r, const part *parts, int n, PyObject *status) {
    ucch_message *m[SIDES];
    ucch_op *ops[SIDES];
    if (!begin(r, parts, m, n, 1)) return NULL;
    for (int i = 0; i < n; i++)
        ops[i] = op_of(m[i]);
    if (!ucch_wait_all_briefly(ops, NULL, n)) return go_on(r, parts, m, n, status);
    ucp_tag_recv_info_t info = m[0]->info;
    for (int i = 0; i < n; i++)
        ucch_message_free(m[i]);
    return fill(r, status, parts[0].receives ? &info : NULL);
}

/* ---- methods of Messenger ---- */

/* send(buf, dest, tag, stream) */
static PyObject *send(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    messenger *r = (messenger *)self;
    part p;
    int plain = n == 4 && is_plain(r, args[3]) && read_part(r, args, 0, &p);
    return plain ? block(r, &p, 1, Py_None) : fall_back(r, SEND, args, n);
}

/* recv(buf, source, tag, status, stream) */
static PyObject *recv(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    messenger *r = (messenger *)self;
    part p;
    int plain = n == 5 && is_plain(r, args[4]) && read_part(r, args, 1, &p);
    return plain ? block(r, &p, 1, args[3]) : fall_back(r, RECV, args, n);
}

/* sendrecv(recvbuf, source, recvtag, sendbuf, dest, sendtag, status, stream) */
static PyObject *sendrecv(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    messenger *r = (messenger *)self;
    part p[SIDES];
    int plain = n == 8 && is_plain(r, args[7]) && read_part(r, args, 1, &p[0]) && read_part(r, args + 3, 0, &p[1]);
    return plain ? block(r, p, SIDES, args[6]) : fall_back(r, SENDRECV, args, n);
}

static PyObject *post(messenger *r, PyObject *const *args, Py_ssize_t n, int receives) {
    part p;
    ucch_message *m;
    if (n != 4 || !is_plain(r, args[3]) || !read_part(r, args, receives, &p))
        return fall_back(r, receives ? IRECV : ISEND, args, n);
    return begin(r, &p, &m, 1, 0) ? request_of(r, &p, m) : NULL;
}

/* isend(buf, dest, tag, stream) */
static PyObject *isend(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return post((messenger *)self, args, n, 0);
}

/* irecv(buf, source, tag, stream) */
static PyObject *irecv(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return post((messenger *)self, args, n, 1);
}

static int look_locked(const messenger *r, const part *p, int rounds, ucp_tag_recv_info_t *found) {
    ucch_message probe = {0};
    uint64_t tag, mask = pattern(r, p, &tag);
    int seen = 0;
    for (int i = 0; i < rounds && !seen && (i == 0 || !(ucch_crowded || ucch_lock_wanted())); i++)
        seen = ucch_probe(&probe, r->worker, tag, mask, 0);
    *found = probe.info;
    return seen;
}

/* Look for a message, several times; or for `seconds`, without the GIL. Returns 1 if there is one, 0 if not. */
static int look(const messenger *r, const part *p, int rounds, double seconds, ucp_tag_recv_info_t *found) {
    double began = ucch_now(), now = began;
    int seen = 0;
    if (!seconds && ucch_trylock()) {
        seen = look_locked(r, p, rounds, found);
        ucch_unlock();
        return seen;
    }
    Py_BEGIN_ALLOW_THREADS;
    do {
        ucch_lock();
        seen = look_locked(r, p, rounds, found);
        ucch_unlock();
        if (!seen && seconds) now = ucch_rest(ucch_now(), began);
    } while (!seen && now < began + seconds);
    Py_END_ALLOW_THREADS;
    return seen;
}

static PyObject *probe_for(messenger *r, PyObject *const *args, Py_ssize_t n, int which) {
    part p;
    ucp_tag_recv_info_t found;
    if (n != 3 || !is_plain(r, Py_None) || !read_place(r, args[0], args[1], 1, &p))
        return fall_back(r, which == PROBE ? PROBE : IPROBE, args, n);
    int seen = look(r, &p, which == PROBE ? ROUNDS : 1, which == POLL ? POLL_S : 0, &found);
    return seen ? fill(r, args[2], &found) : fall_back(r, which == PROBE ? PROBE : OBJECT, args, n);
}

/* probe(source, tag, status) */
static PyObject *probe(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return probe_for((messenger *)self, args, n, PROBE);
}

/* poll(source, tag, status): as iprobe, but wait for a moment. */
static PyObject *poll(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return probe_for((messenger *)self, args, n, POLL);
}

/* iprobe(source, tag, status); OBJECT looks for a Python object. */
static PyObject *iprobe(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return probe_for((messenger *)self, args, n, IPROBE);
}

/* endpoint(rank, address): the connection with a rank. */
static PyObject *endpoint(PyObject *self, PyObject *args) {
    messenger *r = (messenger *)self;
    int rank;
    unsigned long long at;
    if (!PyArg_ParseTuple(args, "iK", &rank, &at)) return NULL;
    if (rank >= 0 && rank < r->size) r->endpoints[rank] = (ucp_ep_h)(uintptr_t)at;
    Py_RETURN_NONE;
}

/* plain(type, itemsize): contiguous arrays of this element type are plain. */
static PyObject *plain(PyObject *self, PyObject *args) {
    messenger *r = (messenger *)self;
    PyObject *type;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "On", &type, &size)) return NULL;
    for (int i = 0; i < TYPES && !itemsize(r, type); i++)
        if (!r->types[i]) {
            r->types[i] = Py_NewRef(type);
            r->itemsize[i] = size;
        }
    Py_RETURN_NONE;
}

/* Messenger(functions, queues, (worker, board, base, mask), (rank, size, any_source, any_tag), slots) */
static int set_up(PyObject *self, PyObject *args, PyObject *names) {
    messenger *r = (messenger *)self;
    PyObject *functions, *queues, *slots;
    unsigned long long worker, board, base, mask;
    (void)names;
    if (r->functions) return 0; /* only once */
    if (!PyArg_ParseTuple(args, "O!O!(KKKK)(iiii)O!", &PyTuple_Type, &functions, &PyTuple_Type, &queues, &worker,
                          &board, &base, &mask, &r->rank, &r->size, &r->any_source, &r->any_tag, &PyList_Type, &slots))
        return -1;
    r->endpoints = PyMem_Calloc((size_t)r->size, sizeof(ucp_ep_h));
    r->slots = PyMem_Calloc((size_t)r->size + 1, sizeof(int));
    if (!r->endpoints || !r->slots) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i <= r->size && i < PyList_Size(slots); i++)
        r->slots[i] = (int)PyLong_AsLong(PyList_GetItem(slots, i));
    r->worker = (ucp_worker_h)(uintptr_t)worker;
    r->board = (ucch_board *)(uintptr_t)board;
    r->base = base;
    r->mask = mask;
    r->queues = Py_NewRef(queues);
    r->functions = Py_NewRef(functions);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    messenger *r = (messenger *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->functions);
    Py_VISIT(r->queues);
    return 0;
}

static void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    messenger *r = (messenger *)self;
    PyObject_GC_UnTrack(self);
    Py_CLEAR(r->functions);
    Py_CLEAR(r->queues);
    for (int i = 0; i < TYPES; i++)
        Py_CLEAR(r->types[i]);
    PyMem_Free(r->endpoints);
    PyMem_Free(r->slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {METHOD(send, METH_FASTCALL),
                                METHOD(recv, METH_FASTCALL),
                                METHOD(sendrecv, METH_FASTCALL),
                                METHOD(isend, METH_FASTCALL),
                                METHOD(irecv, METH_FASTCALL),
                                METHOD(probe, METH_FASTCALL),
                                METHOD(poll, METH_FASTCALL),
                                METHOD(iprobe, METH_FASTCALL),
                                METHOD(endpoint, METH_VARARGS),
                                METHOD(plain, METH_VARARGS),
                                {0}};
static PyMemberDef members[] = {{"timeout", T_DOUBLE, offsetof(messenger, timeout), 0, NULL},
                                {"active", T_PYSSIZET, offsetof(messenger, active), READONLY, NULL},
                                {0}};
static PyType_Slot slots[] = {
    {Py_tp_init, set_up},     {Py_tp_traverse, traverse}, {Py_tp_dealloc, end},
    {Py_tp_methods, methods}, {Py_tp_members, members},   {0, NULL},
};
static PyType_Spec spec = {"ucc_hetero._repeat.Messenger", sizeof(messenger), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

/* ---- requests of messages ---- */

static PyObject *fill_for(posted *q, PyObject *status, int state) {
    if (q->op) q->info = message_of(q)->info;
    return fill((messenger *)q->by, status, q->receives && state ? &q->info : NULL);
}

static void end_message(posted *q) { ucch_message_free(message_of(q)); }

static void free_message(PyObject *owner) { ucch_message_free(PyCapsule_GetPointer(owner, NULL)); }

static PyObject *adopt(posted *q) {
    if (!q->owner) {
        ucch_message *m = q->op ? message_of(q) : ucch_message_new();
        q->owner = m ? PyCapsule_New(m, NULL, free_message) : PyErr_NoMemory();
    }
    if (!q->owner) return NULL;
    return PyObject_CallFunction(function((messenger *)q->by, ADOPT), "OOKOiii", q, q->owner,
                                 (unsigned long long)(uintptr_t)PyCapsule_GetPointer(q->owner, NULL), q->kept[0],
                                 q->peer, q->tag, q->receives);
}

static const posted_kind of_message = {fill_for, end_message, adopt};

int ucch_add_messages(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int added = type && !PyModule_AddObjectRef(module, "Messenger", type) && !ucch_add_requests(module);
    Py_XDECREF(type);
    return added ? 0 : -1;
}
#endif
