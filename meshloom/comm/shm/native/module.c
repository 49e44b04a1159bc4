/* The engine as a Python module: numbers and addresses in, numbers out. comm/shm/native_engine.py calls it. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "engine.h"

enum { PLACES = ML_MAX_RANKS };

static ml_group *group_of(PyObject *handle) { return PyCapsule_GetPointer(handle, "meshloom.group"); }

static int enough(Py_ssize_t given, Py_ssize_t needed) {
    if (given == needed) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given and %zd are needed", given, needed);
    return 0;
}

/* Reads a tuple of at most PLACES integers. Returns their number, or -1. */
static Py_ssize_t integers(PyObject *tuple, int64_t *to) {
    Py_ssize_t length = PyTuple_Size(tuple);
    if (length > PLACES) {
        PyErr_Format(PyExc_ValueError, "%zd numbers were given, and at most %d fit", length, PLACES);
        return -1;
    }
    for (Py_ssize_t index = 0; index < length; index++) {
        to[index] = PyLong_AsLongLong(PyTuple_GetItem(tuple, index));
        if (to[index] == -1 && PyErr_Occurred()) return -1;
    }
    return length;
}

/* Likewise of addresses, exactly `needed`. Returns whether there are as many. */
static int addresses(PyObject *tuple, void **to, Py_ssize_t needed) {
    Py_ssize_t length = PyTuple_Size(tuple);
    if (length < 0 || !enough(length, needed)) return 0;
    for (Py_ssize_t index = 0; index < length; index++) to[index] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, index));
    return !PyErr_Occurred();
}

/* Whether the group has such a rank; an exception is set if not. */
static int is_rank(ml_group *group, long rank) {
    if (rank >= 0 && rank < ml_size(group)) return 1;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "there is no rank %ld in a group of %d", rank, ml_size(group));
    return 0;
}

static int is_dtype(long dtype) {
    if (dtype >= 0 && dtype < ML_DTYPES) return 1;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "there is no dtype %ld", dtype);
    return 0;
}

static void set_shape(ml_call *call, PyObject *shape) {
    Py_ssize_t length = PyTuple_Size(shape);
    call->ndim = (uint8_t)length;
    for (Py_ssize_t dim = 0; dim < length && dim < ML_DIMS; dim++) call->shape[dim] = PyLong_AsLongLong(PyTuple_GetItem(shape, dim));
}

static PyObject *number_or_memory(int64_t number) { return number < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(number); }

static void destroy(PyObject *handle) { ml_close(group_of(handle)); }

static PyObject *control_bytes(PyObject *module, PyObject *size) {
    (void)module;
    return PyLong_FromSize_t(ml_control_bytes((int)PyLong_AsLong(size)));
}

static PyObject *reduces(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (!enough(n, 2) || !is_dtype(PyLong_AsLong(args[0]))) return NULL;
    long op = PyLong_AsLong(args[1]);
    return PyBool_FromLong(op >= 0 && op <= ML_XOR && ml_reduces((int)PyLong_AsLong(args[0]), (int)op));
}

/* rank, size, address of the control area, addresses of the arenas, their bytes, own arena's file, settings in the order of ml_settings */
static PyObject *open_group(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    void *arenas[PLACES];
    int64_t numbers[PLACES];
    if (!enough(n, 7)) return NULL;
    int rank = (int)PyLong_AsLong(args[0]), size = (int)PyLong_AsLong(args[1]), file = (int)PyLong_AsLong(args[5]);
    if (PyErr_Occurred() || rank < 0 || rank >= size || size > PLACES) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "rank %d of %d", rank, size);
    if (!addresses(args[3], arenas, size) || !enough(integers(args[6], numbers), 8)) return NULL;
    ml_settings settings = {
        (uint64_t)numbers[0], (uint64_t)numbers[1], (uint64_t)numbers[2], (uint64_t)numbers[3],
        (uint64_t)numbers[4], (uint64_t)numbers[5], (uint32_t)numbers[6], (uint32_t)numbers[7],
    };
    void *control = PyLong_AsVoidPtr(args[2]);
    uint64_t capacity = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    ml_group *group = ml_open(rank, size, control, arenas, capacity, file, &settings);
    return group ? PyCapsule_New(group, "meshloom.group", destroy) : PyErr_NoMemory();
}

static PyObject *add_window(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    void *bases[PLACES];
    ml_group *group = enough(n, 3) ? group_of(args[0]) : NULL;
    if (!group || !addresses(args[1], bases, ml_size(group))) return NULL;
    return number_or_memory(ml_add_window(group, bases, PyLong_AsUnsignedLongLong(args[2])));
}

/* group, kind, op, dtype, root, count, shape, in, out; in and out are an address or a tuple of one for each rank */
static PyObject *start(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    ml_group *group = enough(n, 9) ? group_of(args[0]) : NULL;
    void *ins[PLACES], *outs[PLACES];
    long kind = group ? PyLong_AsLong(args[1]) : -1, op = group ? PyLong_AsLong(args[2]) : -1;
    if (!group || !is_dtype(PyLong_AsLong(args[3])) || !is_rank(group, PyLong_AsLong(args[4]))) return NULL;
    int is_reduced = kind == ML_ALL_REDUCE || kind == ML_REDUCE || kind == ML_REDUCE_SCATTER;
    if (kind < 0 || kind >= ML_ALL_TO_ALL || op < 0 || op > ML_XOR || (is_reduced && !ml_reduces((int)PyLong_AsLong(args[3]), (int)op)))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no call %ld by %ld", kind, op);
    ml_call call = {
        .kind = (uint8_t)kind, .op = (uint8_t)op, .dtype = (uint8_t)PyLong_AsLong(args[3]),
        .root = (int32_t)PyLong_AsLong(args[4]), .count = PyLong_AsUnsignedLongLong(args[5]),
    };
    set_shape(&call, args[6]);
    if (PyTuple_Check(args[7])) {
        if (!addresses(args[7], ins, ml_size(group))) return NULL;
        call.ins = (const void *const *)ins;
    } else
        call.in = PyLong_AsVoidPtr(args[7]);
    if (PyTuple_Check(args[8])) {
        if (!addresses(args[8], outs, ml_size(group))) return NULL;
        call.outs = outs;
    } else
        call.out = PyLong_AsVoidPtr(args[8]);
    return PyErr_Occurred() ? NULL : number_or_memory(ml_start(group, &call));
}

/* group, dtype, in, out, sizes to each rank, sizes from each rank */
static PyObject *start_all_to_all(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    int64_t to[PLACES], from[PLACES];
    ml_group *group = enough(n, 6) ? group_of(args[0]) : NULL;
    if (!group || !is_dtype(PyLong_AsLong(args[1])) || !enough(integers(args[4], to), ml_size(group)) || !enough(integers(args[5], from), ml_size(group)))
        return NULL;
    ml_call call = {
        .kind = ML_ALL_TO_ALL, .dtype = (uint8_t)PyLong_AsLong(args[1]), .in = PyLong_AsVoidPtr(args[2]), .out = PyLong_AsVoidPtr(args[3]),
        .in_sizes = to, .out_sizes = from,
    };
    return PyErr_Occurred() ? NULL : number_or_memory(ml_start(group, &call));
}

/* A wait polls once while it holds the interpreter lock: most operations finish within microseconds. */
static PyObject *waited(PyObject *const *args, Py_ssize_t n, enum ml_status function(ml_group *, int64_t, int64_t)) {
    if (!enough(n, 3)) return NULL;
    ml_group *group = group_of(args[0]);
    int64_t which = PyLong_AsLongLong(args[1]), microseconds = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    enum ml_status status = function(group, which, 0);
    if (status == ML_WAITING && microseconds > 0) {
        Py_BEGIN_ALLOW_THREADS
        status = function(group, which, microseconds);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(status);
}

static PyObject *wait_operation(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    return waited(args, n, ml_wait);
}

static PyObject *wait_message(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    return waited(args, n, ml_wait_message);
}

/* group, the other rank, tag, dtype, count, shape, address */
static PyObject *messaged(PyObject *const *args, Py_ssize_t n, int sends) {
    ml_group *group = enough(n, 7) ? group_of(args[0]) : NULL;
    long peer = group ? PyLong_AsLong(args[1]) : -1;
    if (!group || ((sends || peer != -1) && !is_rank(group, peer)) || !is_dtype(PyLong_AsLong(args[3]))) return NULL;
    int64_t tag = PyLong_AsLongLong(args[2]);
    ml_call call = {.dtype = (uint8_t)PyLong_AsLong(args[3]), .count = PyLong_AsUnsignedLongLong(args[4])};
    set_shape(&call, args[5]);
    void *address = PyLong_AsVoidPtr(args[6]);
    if (PyErr_Occurred()) return NULL;
    if (sends)
        call.in = address;
    else
        call.out = address;
    return number_or_memory(sends ? ml_send(group, (int)peer, tag, &call) : ml_receive(group, (int)peer, tag, &call));
}

static PyObject *send_message(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    return messaged(args, n, 1);
}

static PyObject *receive_message(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    return messaged(args, n, 0);
}

static PyObject *message_source(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    return enough(n, 2) ? PyLong_FromLong(ml_message_source(group_of(args[0]), PyLong_AsLongLong(args[1]))) : NULL;
}

static PyObject *release_message(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (!enough(n, 2)) return NULL;
    ml_release_message(group_of(args[0]), PyLong_AsLongLong(args[1]));
    return Py_NewRef(Py_None);
}

static PyObject *abort_group(PyObject *module, PyObject *handle) {
    (void)module;
    ml_abort(group_of(handle));
    return Py_NewRef(Py_None);
}

static PyObject *aborted_by(PyObject *module, PyObject *handle) {
    (void)module;
    return PyLong_FromLong(ml_aborted_by(group_of(handle)));
}

static PyObject *started(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    ml_group *group = enough(n, 2) ? group_of(args[0]) : NULL;
    return group && is_rank(group, PyLong_AsLong(args[1])) ? PyLong_FromUnsignedLongLong(ml_started(group, (int)PyLong_AsLong(args[1]))) : NULL;
}

static PyObject *finished(PyObject *module, PyObject *handle) {
    (void)module;
    return PyLong_FromUnsignedLongLong(ml_finished(group_of(handle)));
}

/* The rank whose call differs, and the number of that call or letter: (rank, number) */
static PyObject *mismatch(PyObject *module, PyObject *handle) {
    (void)module;
    uint64_t number = 0;
    int rank = ml_mismatch(group_of(handle), &number);
    return Py_BuildValue("iK", rank, (unsigned long long)number);
}

static PyObject *described(const ml_descriptor *found) {
    PyObject *shape = PyTuple_New(found->ndim < ML_DIMS ? found->ndim : ML_DIMS);
    for (Py_ssize_t dim = 0; shape && dim < PyTuple_Size(shape); dim++) PyTuple_SetItem(shape, dim, PyLong_FromLongLong(found->shape[dim]));
    return Py_BuildValue("iiiiKN", found->kind, found->op, found->dtype, (int)found->root, (unsigned long long)found->count, shape);
}

/* group, rank, number -> (kind, op, dtype, root, count, shape), or None if it is not stored (any more) */
static PyObject *descriptor(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    ml_descriptor found;
    ml_group *group = enough(n, 3) ? group_of(args[0]) : NULL;
    if (!group || !is_rank(group, PyLong_AsLong(args[1]))) return NULL;
    return ml_descriptor_of(group, (int)PyLong_AsLong(args[1]), PyLong_AsUnsignedLongLong(args[2]), &found) ? described(&found) : Py_NewRef(Py_None);
}

/* group, source, number of a letter that does not match -> the same of the letter, or None if it is invalid */
static PyObject *letter(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    ml_descriptor found;
    ml_group *group = enough(n, 3) ? group_of(args[0]) : NULL;
    if (!group || !is_rank(group, PyLong_AsLong(args[1]))) return NULL;
    return ml_letter_of(group, (int)PyLong_AsLong(args[1]), PyLong_AsUnsignedLongLong(args[2]), &found) ? described(&found) : Py_NewRef(Py_None);
}

static PyObject *missing_bytes(PyObject *module, PyObject *handle) {
    (void)module;
    return PyLong_FromUnsignedLongLong(ml_missing_bytes(group_of(handle)));
}

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef METHODS[] = {
    {"control_bytes", control_bytes, METH_O, NULL},
    FAST("reduces", reduces),
    FAST("open_group", open_group),
    FAST("add_window", add_window),
    FAST("start", start),
    FAST("start_all_to_all", start_all_to_all),
    FAST("wait", wait_operation),
    FAST("send", send_message),
    FAST("receive", receive_message),
    FAST("wait_message", wait_message),
    FAST("message_source", message_source),
    FAST("release_message", release_message),
    {"abort", abort_group, METH_O, NULL},
    {"aborted_by", aborted_by, METH_O, NULL},
    FAST("started", started),
    {"finished", finished, METH_O, NULL},
    {"mismatch", mismatch, METH_O, NULL},
    FAST("descriptor", descriptor),
    FAST("letter", letter),
    {"missing_bytes", missing_bytes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_engine", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__engine(void) { return PyModule_Create(&MODULE); }
