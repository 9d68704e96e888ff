// What the hooks do in an idle step (phases.py), for native_hooks.py. In Python it takes four times as long, because
// training has evicted the interpreter's data from the caches.
//
// Python's headers are often not installed. Of its functions only those are used that every CPython since 3.10 exports;
// the caller holds the GIL.
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

using PyObject = struct _object;
extern "C" {
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject*);
  int flags;
  const char* doc;
};
enum { METH_NOARGS = 4, METH_O = 8 };
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* PyBool_FromLong(long);
PyObject* PyLong_FromLong(long);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Clear();
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_CallNoArgs(PyObject*);
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
intptr_t PyDict_Size(PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
PyObject* PyCell_Get(PyObject*);
PyObject* PyEval_GetFrame();
PyObject* PyFrame_GetBack(PyObject*);
PyObject* PyFrame_GetCode(PyObject*);
[[gnu::weak]] PyObject* PyFrame_GetVar(PyObject*, PyObject*);  // since Python 3.12
}

namespace {

class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

constexpr int kPhaseBits = 3;  // quiet_mark.BITS
constexpr int kTimesMax = 4096, kSlots = 8192;
constexpr uint64_t kBetween = 1;  // quiet_mark.IN_BETWEEN

// The fields of native_hooks.NativeMark.
struct Mark {
  uint64_t* word;
  uint64_t step;
  uint64_t only;
  int64_t left;
  int64_t due_ns;
  int64_t passed;
  int64_t closed;
  bool idle;
  bool evaluates;
  int64_t closed_ns[kTimesMax];
  uint64_t fitting[kSlots];
};

// Objects and layouts of torch and Python, which native_hooks.py looks up. They live as long as the process.
struct Known {
  PyObject* call_code;    // of Module._call_impl
  PyObject* tensor;       // torch.Tensor
  PyObject* plain[5];     // types of arguments that do not change the forward's memory by much
  PyObject* every[4];     // the dicts of hooks of all modules
  PyObject* names[3];     // "self", "args", "kwargs"
  int slots[3];           // their places in the frame's array. Python 3.10 and 3.11
  int array_in;           // words into the frame where a pointer to the array's owner is; -1: it is the frame
  int array_at;           // words into that owner; -1: PyFrame_GetVar reads the variables
  int impl_at;            // bytes into a tensor's PyObject
} known;

PyObject* variable(PyObject* frame, int which) {
  if (known.array_at < 0) {
    PyObject* value = PyFrame_GetVar(frame, known.names[which]);
    if (value == nullptr) PyErr_Clear();
    return value;
  }
  auto** words = reinterpret_cast<PyObject**>(frame);
  if (known.array_in >= 0) words = reinterpret_cast<PyObject**>(words[known.array_in]);
  return PyCell_Get(words[known.array_at + known.slots[which]]);
}

// native_hooks.hashed
struct Hash {
  uint64_t value = 0xCBF29CE484222325;
  void add(int64_t number) { value = (value ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15; }
};

bool fits(const Mark& mark, uint64_t hash) {
  hash = hash ? hash : 1;
  for (uint64_t at = hash / (UINT64_MAX / kSlots + 1);; at = (at + 1) % kSlots) {
    if (mark.fitting[at] == hash) return true;
    if (mark.fitting[at] == 0) return false;
  }
}

// Adds the shape of an argument. False: it may need a look in Python.
bool add(Hash& hash, PyObject* value) {
  const Owned type(PyObject_Type(value));
  if (type.get() != known.tensor)
    return std::find(std::begin(known.plain), std::end(known.plain), type.get()) != std::end(known.plain);
  const auto* object = reinterpret_cast<const char*>(value);
  const auto sizes = (*reinterpret_cast<c10::TensorImpl* const*>(object + known.impl_at))->sizes();
  hash.add(static_cast<int64_t>(sizes.size()));
  for (const auto size : sizes) hash.add(size);
  return true;
}

// Whether the call of a module that runs `__bool__` of its hook dict is that of `model`, with shapes that fit.
bool is_known(const Mark& mark, PyObject* model) {
  PyObject* own = PyEval_GetFrame();
  const Owned frame(own == nullptr ? nullptr : PyFrame_GetBack(own));
  if (frame.get() == nullptr) return false;
  const Owned code(PyFrame_GetCode(frame.get()));
  if (code.get() != known.call_code) return false;
  for (PyObject* hooks : known.every)
    if (PyDict_Size(hooks) != 0) return false;
  const Owned module(variable(frame.get(), 0));
  if (module.get() != model) return false;
  if (!c10::GradMode::is_enabled()) return mark.evaluates;

  const Owned args(variable(frame.get(), 1)), kwargs(variable(frame.get(), 2));
  if (args.get() == nullptr || kwargs.get() == nullptr) return false;
  Hash hash;
  const auto count = PyTuple_Size(args.get());
  for (intptr_t at = 0; at < count; ++at)
    if (!add(hash, PyTuple_GetItem(args.get(), at))) return false;
  intptr_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs.get(), &at, &name, &value))
    if (!add(hash, value)) return false;
  return fits(mark, hash.value);
}

// What one of the functions below belongs to.
struct Bound {
  Mark* mark;
  PyObject* owner;     // of the mark
  PyObject* argument;  // a weak reference to the model, or None
  uint64_t code;
};

const Bound& bound(PyObject* self) { return *static_cast<Bound*>(PyCapsule_GetPointer(self, nullptr)); }

void forget(PyObject* self) {
  auto* each = static_cast<Bound*>(PyCapsule_GetPointer(self, nullptr));
  Py_DecRef(each->owner);
  Py_DecRef(each->argument);
  delete each;
}

// () -> bool: a forward begins, and nothing about it is new.
PyObject* forward(PyObject* self, PyObject*) {
  const auto& [mark, _, reference, code] = bound(self);
  bool passes = false;
  if (mark->idle) {
    const Owned model(PyObject_CallNoArgs(reference));
    try {
      passes = is_known(*mark, model.get());
    } catch (...) {  // a nested tensor has no shape
      passes = false;
    }
    if (passes) {
      ++mark->passed;
      *mark->word = mark->step | code;
    }
  }
  return PyBool_FromLong(passes);
}

// () -> bool: in an idle step, a phase begins.
PyObject* enter(PyObject* self, PyObject*) {
  const auto& [mark, _, __, code] = bound(self);
  if (mark->idle) *mark->word = mark->step | code;
  return PyBool_FromLong(mark->idle);
}

// (optimizer) -> bool: the same, if this optimizer closes the idle steps.
PyObject* begin(PyObject* self, PyObject* optimizer) {
  const auto& [mark, _, __, code] = bound(self);
  const bool passes = mark->idle && mark->only == reinterpret_cast<uintptr_t>(optimizer);
  if (passes) *mark->word = mark->step | code;
  return PyBool_FromLong(passes);
}

// (optimizer) -> 0, quiet_mark.PASSED or quiet_mark.DUE: an idle step closes.
PyObject* close(PyObject* self, PyObject* optimizer) {
  auto* mark = bound(self).mark;
  if (!mark->idle || mark->only != reinterpret_cast<uintptr_t>(optimizer)) return PyLong_FromLong(0);
  const int64_t now =
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();  // monotonic_ns()
  mark->closed_ns[std::min<int64_t>(mark->closed, kTimesMax - 1)] = now;
  mark->closed = std::min<int64_t>(mark->closed + 1, kTimesMax);
  mark->passed = 0;
  --mark->left;
  mark->step += 1 << kPhaseBits;
  *mark->word = mark->step | kBetween;
  return PyLong_FromLong(mark->left <= 0 || now >= mark->due_ns ? 2 : 1);
}

PyMethodDef methods[] = {
    {"forward", forward, METH_NOARGS, nullptr},
    {"enter", enter, METH_NOARGS, nullptr},
    {"begin", begin, METH_O, nullptr},
    {"close", close, METH_O, nullptr},
};

}  // namespace

extern "C" {

// Of Mark: Python's structure must be as large.
uint64_t gpumon_mark_bytes() { return sizeof(Mark); }

// `objects`: a tuple of the 14 objects of Known, in its order.
void gpumon_know(PyObject* objects, const int* slots, int array_in, int array_at, int impl_at) {
  PyObject** fields[] = {&known.call_code, &known.tensor};
  int next = 0;
  const auto take = [&](PyObject*& field) {
    field = PyTuple_GetItem(objects, next++);
    Py_IncRef(field);
  };
  for (auto** field : fields) take(*field);
  for (auto*& field : known.plain) take(field);
  for (auto*& field : known.every) take(field);
  for (auto*& field : known.names) take(field);
  std::copy_n(slots, 3, known.slots);
  known.array_in = array_in;
  known.array_at = array_at;
  known.impl_at = impl_at;
}

// One of `methods`, as a Python function. `argument`: see Bound; None for all but the first.
PyObject* gpumon_hook(int which, PyObject* owner, Mark* mark, PyObject* argument, uint64_t code) {
  Py_IncRef(owner);
  Py_IncRef(argument);
  PyObject* self = PyCapsule_New(new Bound{mark, owner, argument, code}, nullptr, forget);
  PyObject* function = PyCFunction_NewEx(&methods[which], self, nullptr);
  Py_DecRef(self);
  return function;
}
}
