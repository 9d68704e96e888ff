// What the hooks do in an idle step (phases.py), for native_hooks.py. In Python it takes four times as long, because
// training has evicted the interpreter's data from the caches. A step that is read takes notes: at the end of each phase
// the allocator's figures, which Python takes later, of many steps at once.
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
struct PyType_Slot {
  int slot;
  void* function;
};
struct PyType_Spec {
  const char* name;
  int basicsize;
  int itemsize;
  unsigned int flags;
  PyType_Slot* slots;
};
enum { Py_nb_bool = 9, Py_TPFLAGS_DEFAULT = 1 << 18 };
PyObject* PyType_FromSpecWithBases(PyType_Spec*, PyObject*);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* PyBool_FromLong(long);
PyObject* PyLong_FromLong(long);
PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void PyErr_Clear();
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_CallMethodObjArgs(PyObject*, PyObject*, ...);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
int PyObject_IsTrue(PyObject*);
unsigned long PyThread_get_thread_ident();
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);
intptr_t PyDict_Size(PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
PyObject* PyCell_Get(PyObject*);
PyObject* PyEval_GetFrame();
PyObject* PyFrame_GetBack(PyObject*);
PyObject* PyFrame_GetCode(PyObject*);
[[gnu::weak]] PyObject* PyFrame_GetVar(PyObject*, PyObject*);  // since Python 3.12

int gpumon_boundary(int device, int64_t* figures, int64_t* peaks, int what);  // native.cpp
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
constexpr int kTimesMax = 16384, kSlots = 8192;
constexpr uint64_t kBetween = 1, kBackward = 4, kOptimizer = 5;  // quiet_mark's IN_…
constexpr int kNotesMax = 1024, kFigures = 10, kPeaks = 29, kInputsMax = 8, kEndsMax = 64;
enum { kReadOnly = 0, kResetAndCheck = 3, kRead = 0, kDisturbed = 1 };  // of native.cpp
enum { kAllocated = 0, kPeak = 1, kReserved = 2, kSplit = 5, kLiveBlocks = 7, kRetries = 8 };  // of its figures

// The end of a phase.
struct Note {
  uint64_t code;       // of the phase
  int64_t t_ns;        // monotonic_ns()
  uint64_t shapes;     // their hash, if a forward begins
  int64_t bytes;       // of its inputs
  int64_t disturbed;   // another thread has allocated
  int64_t figures[kFigures];
};

// What is allocated as a quiet step ends.
struct End {
  uint64_t step;
  int64_t allocated;
  int64_t live_blocks;
};

// The fields of native_hooks.NativeMark.
struct Mark {
  uint64_t* word;
  const uint64_t* called;  // the helper's word
  uint64_t heard;          // it, when it was last looked at
  uint64_t step;
  uint64_t only;
  int64_t left;
  int64_t due_ns;
  int64_t ends_due_ns;
  int64_t passed;
  int64_t closed;
  bool idle;
  bool evaluates;
  bool notes;       // the open step is read
  bool engine;      // it runs its backward
  bool stepping;    // its optimizer
  uint64_t root;    // the model whose forward it runs, or 0
  uint64_t thread;  // that trains
  int64_t device;
  int64_t* peaks;   // see gpumon_boundary
  int64_t noted;
  int64_t ends_every_ns;
  int64_t ends_device;  // -1: Python reads the ends
  int64_t ended;
  End ends[kEndsMax];
  int64_t closed_ns[kTimesMax];
  uint64_t fitting[kSlots];
  Note noted_phases[kNotesMax];
};

// Objects and layouts of torch and Python, which native_hooks.py looks up. They live as long as the process.
struct Known {
  PyObject* call_code;    // of Module._call_impl
  PyObject* inner_code;   // of the function in it that calls hooks; None: there is none
  PyObject* training;     // "training"
  PyObject* tensor;       // torch.Tensor
  PyObject* plain[5];     // types of arguments that do not change the forward's memory by much
  PyObject* every[4];     // the dicts of hooks of all modules
  PyObject* names[3];     // "self", "args", "kwargs"
  PyObject* asks;         // "asks"
  int slots[3];           // their places in the frame's array. Python 3.10 and 3.11
  int array_in;           // words into the frame where a pointer to the array's owner is; -1: it is the frame
  int array_at;           // words into that owner; -1: PyFrame_GetVar reads the variables
  int impl_at;            // bytes into a tensor's PyObject
  int dict_bytes;         // of an OrderedDict
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

// The tensors that a forward is called with.
struct Inputs {
  Hash hash;
  int64_t bytes = 0;
  const c10::TensorImpl* seen[kInputsMax];
  int count = 0;
  bool plain = true;  // `bytes` is right

  void add(const c10::TensorImpl* tensor) {
    const auto sizes = tensor->sizes();
    hash.add(static_cast<int64_t>(sizes.size()));
    for (const auto size : sizes) hash.add(size);
    plain = plain && count < kInputsMax && tensor->layout() == c10::kStrided && !tensor->device().is_meta() &&
            std::find(seen, seen + count, tensor) == seen + count;
    if (plain) {
      seen[count++] = tensor;
      bytes += tensor->numel() * static_cast<int64_t>(tensor->itemsize());
    }
  }
};

// Adds an argument. False: it may need a look in Python.
bool add(Inputs& inputs, PyObject* value) {
  const Owned type(PyObject_Type(value));
  if (type.get() != known.tensor)
    return std::find(std::begin(known.plain), std::end(known.plain), type.get()) != std::end(known.plain);
  const auto* object = reinterpret_cast<const char*>(value);
  inputs.add(*reinterpret_cast<c10::TensorImpl* const*>(object + known.impl_at));
  return true;
}

bool runs(PyObject* frame, PyObject* code) {
  if (frame == nullptr) return false;
  const Owned own(PyFrame_GetCode(frame));
  return own.get() == code;
}

// The frame that asks a hook dict for its bool().
PyObject* caller() {
  PyObject* own = PyEval_GetFrame();
  if (own != nullptr) Py_IncRef(own);
  return own;
}

bool is_true(PyObject* object, PyObject* name) {
  const Owned value(PyObject_GetAttr(object, name));
  const int found = value.get() == nullptr ? -1 : PyObject_IsTrue(value.get());
  if (found < 0) PyErr_Clear();
  return found > 0;
}

// Whether the call of a module that asks its hook dict for its bool() is that of `model`, with shapes that fit.
bool is_known(const Mark& mark, PyObject* model, Inputs& inputs) {
  const Owned asks(caller());
  const bool within = runs(asks.get(), known.inner_code);
  const Owned outer(within ? PyFrame_GetBack(asks.get()) : nullptr);
  const auto& frame = within ? outer : asks;
  if (!runs(frame.get(), known.call_code)) return false;
  for (PyObject* hooks : known.every)
    if (PyDict_Size(hooks) != 0) return false;
  const Owned module(variable(frame.get(), 0));
  if (module.get() != model) return false;
  if (mark.notes && !(c10::GradMode::is_enabled() && is_true(model, known.training))) return false;
  if (!c10::GradMode::is_enabled()) return mark.evaluates;

  const Owned args(variable(frame.get(), 1)), kwargs(variable(frame.get(), 2));
  if (args.get() == nullptr || kwargs.get() == nullptr) return false;
  const auto count = PyTuple_Size(args.get());
  for (intptr_t at = 0; at < count; ++at)
    if (!add(inputs, PyTuple_GetItem(args.get(), at))) return false;
  intptr_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs.get(), &at, &name, &value))
    if (!add(inputs, value)) return false;
  return (inputs.plain || !mark.notes) && fits(mark, inputs.hash.value);
}

int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of a step that takes notes: whether this is the thread that trains.
bool trains(const Mark& mark) { return mark.thread == PyThread_get_thread_ident(); }

// A phase ends, and another begins. False: Python must read the allocator.
bool note(Mark& mark, uint64_t code, uint64_t next, const Inputs& inputs = {}) {
  if (mark.noted >= kNotesMax) return false;
  auto& made = mark.noted_phases[mark.noted];
  made.t_ns = monotonic_ns();
  const int said = gpumon_boundary(static_cast<int>(mark.device), made.figures, mark.peaks, kResetAndCheck);
  if (said != kRead && said != kDisturbed) return false;
  made.code = code;
  made.shapes = inputs.hash.value;
  made.bytes = inputs.bytes;
  made.disturbed = said == kDisturbed;
  ++mark.noted;
  *mark.word = mark.step | next;
  return true;
}

// Of the steps that were noted first and have the same phases: how many phases, how many steps, and a hash of all that
// outlooks learn from such a step, or 0 if the steps differ in that.
void find_whole(const Mark& mark, int64_t* whole) {
  const Note* const notes = mark.noted_phases;
  const Note* const end = notes + mark.noted;
  const auto* last = std::find_if(notes, end, [](const Note& each) { return each.code == kOptimizer; });
  const auto phases = last == end ? 0 : last + 1 - notes;
  int64_t steps = 0;
  uint64_t alike = 0;
  for (const auto* step = notes; phases != 0 && end - step >= phases; step += phases, ++steps) {
    if (!std::equal(step, step + phases, notes, [](const Note& a, const Note& b) { return a.code == b.code; })) break;
    Hash hash;
    hash.add(mark.device);
    for (const auto* each = step; each != step + phases; ++each) {
      const auto& figures = each->figures;
      for (const auto word : {static_cast<int64_t>(each->code), static_cast<int64_t>(each->shapes), each->disturbed,
                              figures[kAllocated], figures[kPeak], figures[kReserved], figures[kSplit],
                              figures[kRetries]})
        hash.add(word);
    }
    const auto found = hash.value ? hash.value : 1;
    alike = steps == 0 || alike == found ? found : 0;
  }
  whole[0] = phases;
  whole[1] = steps;
  whole[2] = static_cast<int64_t>(alike);
}

// A forward begins in a step that takes notes, with inputs that are known. False: Python must look at it.
bool note_forward(Mark& mark, PyObject* model, const Inputs& inputs, uint64_t code) {
  if (!trains(mark) || mark.engine || mark.stepping) return false;
  const auto root = reinterpret_cast<uint64_t>(model);
  if (mark.root != 0) return mark.root != root;  // a watched model inside another; or the last call has not ended
  if (!note(mark, kBetween, code, inputs)) return false;
  mark.root = root;
  return true;
}

// Reads what is allocated as a quiet step ends. False: Python must.
bool read_end(Mark& mark, int64_t now) {
  if (mark.ends_device < 0 || mark.ended >= kEndsMax) return false;
  int64_t figures[kFigures], peaks[kPeaks] = {};
  if (gpumon_boundary(static_cast<int>(mark.ends_device), figures, peaks, kReadOnly) != kRead) return false;
  mark.ends[mark.ended++] = {mark.step >> kPhaseBits, figures[kAllocated], figures[kLiveBlocks]};
  mark.ends_due_ns = now + mark.ends_every_ns;
  return true;
}

// What one of the functions below belongs to.
struct Bound {
  Mark* mark;
  PyObject* owner;     // of the mark
  PyObject* argument;  // of a hook dict: a weak reference to the model
  uint64_t code;
  bool begins;         // of a hook dict: torch asks it before a forward
};

// Of a hook dict: what is in its memory after that of an OrderedDict. No owner: the dict's attribute `bound` has it.
Bound*& bound_of(PyObject* dict) { return *reinterpret_cast<Bound**>(reinterpret_cast<char*>(dict) + known.dict_bytes); }

const Bound& bound(PyObject* self) { return *static_cast<Bound*>(PyCapsule_GetPointer(self, nullptr)); }

void forget(PyObject* self) {
  auto* each = static_cast<Bound*>(PyCapsule_GetPointer(self, nullptr));
  Py_DecRef(each->owner);
  Py_DecRef(each->argument);
  delete each;
}

// A forward begins in an idle step: whether nothing about it is new.
bool forward(const Bound& bound) {
  auto* mark = bound.mark;
  const Owned model(PyObject_CallNoArgs(bound.argument));
  Inputs inputs;
  bool passes = false;
  try {
    passes = is_known(*mark, model.get(), inputs);
  } catch (...) {  // a nested tensor has no shape
  }
  if (passes && mark->notes) {
    passes = note_forward(*mark, model.get(), inputs, bound.code);
  } else if (passes) {
    *mark->word = mark->step | bound.code;
  }
  mark->passed += passes;
  return passes;
}

// In an idle step: whether torch must call the model's forward hooks. They take notes at its end, so that torch must
// come here once more: from `inner`, as it looks for hooks to call after the forward.
bool finish(const Bound& bound) {
  auto* mark = bound.mark;
  if (!mark->notes) return false;
  const Owned model(PyObject_CallNoArgs(bound.argument));
  const Owned asks(caller());
  const auto root = reinterpret_cast<uint64_t>(model.get());
  if (mark->root != 0 && mark->root != root) return false;
  if (!runs(asks.get(), known.inner_code)) return known.inner_code != nullptr && runs(asks.get(), known.call_code);
  if (mark->root == 0 || !trains(*mark) || !note(*mark, bound.code, kBackward)) return true;
  mark->root = 0;
  return false;
}

// bool() of a hook dict, which torch asks in each call of the model. It answers what is known of an idle step, if the
// dict holds our hook alone; else the dict's `asks` does. Python is left out because it takes four times as long.
int is_not_empty(PyObject* dict) {
  const auto* bound = bound_of(dict);
  if (bound != nullptr && bound->mark->idle && PyDict_Size(dict) == 1) {
    if (!bound->begins) return finish(*bound);
    if (forward(*bound)) return 0;
  }
  const Owned answer(PyObject_CallMethodObjArgs(dict, known.asks, nullptr));
  return answer.get() == nullptr ? -1 : PyObject_IsTrue(answer.get());
}

// () -> 0, quiet_mark.PASSED or quiet_mark.NOTES: in an idle step, a phase begins. NOTES: call `leave` at its end.
PyObject* enter(PyObject* self, PyObject*) {
  const auto& [mark, _, __, code, ___] = bound(self);
  if (!mark->idle) return PyLong_FromLong(0);
  if (mark->notes) {
    if (!trains(*mark) || mark->root != 0 || mark->engine || mark->stepping || mark->passed == 0)
      return PyLong_FromLong(0);
    mark->engine = true;
  }
  *mark->word = mark->step | code;
  return PyLong_FromLong(mark->notes ? 2 : 1);
}

// () -> bool: that phase ends, and a note is taken.
PyObject* leave(PyObject* self, PyObject*) {
  const auto& [mark, _, __, code, ___] = bound(self);
  const bool ends = mark->notes && mark->engine && trains(*mark) && note(*mark, code, kOptimizer);
  if (ends) mark->engine = false;
  return PyBool_FromLong(ends);
}

// (optimizer) -> bool: as `enter`, if this optimizer closes the idle steps.
PyObject* begin(PyObject* self, PyObject* optimizer) {
  const auto& [mark, _, __, code, ___] = bound(self);
  bool passes = mark->idle && mark->only == reinterpret_cast<uintptr_t>(optimizer);
  if (passes && mark->notes) {
    passes = trains(*mark) && mark->root == 0 && !mark->engine && !mark->stepping;
    mark->stepping = mark->stepping || passes;
  }
  if (passes) *mark->word = mark->step | code;
  return PyBool_FromLong(passes);
}

// (optimizer) -> 0, quiet_mark.PASSED or quiet_mark.DUE: an idle step closes.
PyObject* close(PyObject* self, PyObject* optimizer) {
  auto* mark = bound(self).mark;
  if (!mark->idle || mark->only != reinterpret_cast<uintptr_t>(optimizer)) return PyLong_FromLong(0);
  int64_t now = 0;
  bool due = false;
  if (mark->notes) {
    if (!mark->stepping || !trains(*mark) || !note(*mark, kOptimizer, kBetween)) return PyLong_FromLong(0);
    mark->stepping = false;
    now = mark->noted_phases[mark->noted - 1].t_ns;
    due = mark->noted > kNotesMax / 2;
  } else {
    now = monotonic_ns();
    mark->closed_ns[std::min<int64_t>(mark->closed, kTimesMax - 1)] = now;
    mark->closed = std::min<int64_t>(mark->closed + 1, kTimesMax);
    due = mark->closed > kTimesMax / 2 || *mark->called != mark->heard;
    if (now >= mark->ends_due_ns && !read_end(*mark, now)) due = true;
  }
  mark->passed = 0;
  --mark->left;
  mark->step += 1 << kPhaseBits;
  *mark->word = mark->step | kBetween;
  return PyLong_FromLong(due || mark->left <= 0 || now >= mark->due_ns ? 2 : 1);
}

PyMethodDef methods[] = {
    {"enter", enter, METH_NOARGS, nullptr},
    {"begin", begin, METH_O, nullptr},
    {"close", close, METH_O, nullptr},
    {"leave", leave, METH_NOARGS, nullptr},
};

}  // namespace

extern "C" {

// Of Mark: Python's structure must be as large.
uint64_t gpumon_mark_bytes() { return sizeof(Mark); }

// `objects`: a tuple of the 17 objects of Known, in its order.
void gpumon_know(PyObject* objects, const int* slots, int array_in, int array_at, int impl_at, int dict_bytes) {
  PyObject** fields[] = {&known.call_code, &known.inner_code, &known.training, &known.tensor};
  int next = 0;
  const auto take = [&](PyObject*& field) {
    field = PyTuple_GetItem(objects, next++);
    Py_IncRef(field);
  };
  for (auto** field : fields) take(*field);
  for (auto*& field : known.plain) take(field);
  for (auto*& field : known.every) take(field);
  for (auto*& field : known.names) take(field);
  take(known.asks);
  std::copy_n(slots, 3, known.slots);
  known.array_in = array_in;
  known.array_at = array_at;
  known.impl_at = impl_at;
  known.dict_bytes = dict_bytes;
}

// Returns the notes as bytes. `whole`: see find_whole.
PyObject* gpumon_take_notes(Mark* mark, int64_t* whole) {
  find_whole(*mark, whole);
  const auto* notes = reinterpret_cast<const char*>(mark->noted_phases);
  PyObject* taken = PyBytes_FromStringAndSize(notes, mark->noted * static_cast<intptr_t>(sizeof(Note)));
  if (taken != nullptr) mark->noted = 0;
  return taken;
}

// What a hook belongs to, as an object.
PyObject* gpumon_bound(PyObject* owner, Mark* mark, PyObject* argument, uint64_t code, bool begins) {
  Py_IncRef(owner);
  Py_IncRef(argument);
  return PyCapsule_New(new Bound{mark, owner, argument, code, begins}, nullptr, forget);
}

// One of `methods`, as a Python function.
PyObject* gpumon_hook(int which, PyObject* bound) { return PyCFunction_NewEx(&methods[which], bound, nullptr); }

// A subclass of a class of hook dicts. `bases`: a tuple of that class, whose objects are as large as an OrderedDict.
PyObject* gpumon_hook_dict(PyObject* bases) {
  PyType_Slot slots[] = {{Py_nb_bool, reinterpret_cast<void*>(is_not_empty)}, {0, nullptr}};
  PyType_Spec spec = {"gpumon_agent.hooks.torch_hooks._NativeHooks",
                      known.dict_bytes + static_cast<int>(sizeof(Bound*)), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpecWithBases(&spec, bases);
}

// From here on that is what the dict's bool() is about. None: nothing is known.
void gpumon_bind(PyObject* dict, PyObject* bound) {
  bound_of(dict) = static_cast<Bound*>(PyCapsule_GetPointer(bound, nullptr));
  PyErr_Clear();
}
}
