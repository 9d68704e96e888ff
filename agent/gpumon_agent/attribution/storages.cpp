// The storages of many tensors in one call, for native_storages.py. In Python each tensor takes 0.2 to 1.3 µs.
//
// A training has emptied the caches before each look, so what is read next is fetched ahead, for many tensors at once.
// Python's headers are often not installed: see quiet_hooks.cpp.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

using PyObject = struct _object;
extern "C" {
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
unsigned long PyType_GetFlags(PyObject*);
void PyErr_Clear();
int PyType_IsSubtype(PyObject*, PyObject*);
intptr_t PyList_Size(PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
}

namespace {

constexpr int64_t AT_ONCE = 64;  // tensors fetched ahead
constexpr unsigned long DICT = 1UL << 29;                                   // Py_TPFLAGS_DICT_SUBCLASS
constexpr unsigned long CONTAINER = DICT | (1UL << 25) | (1UL << 26);       // or a list's or a tuple's

struct Storage {
  int64_t identity;  // UntypedStorage._cdata
  int64_t bytes;
  bool operator==(const Storage&) const = default;
};

// Two of an object's cache lines. A place that is not the right one costs only time.
void fetch(const void* object, int one, int other) {
  __builtin_prefetch(static_cast<const char*>(object) + one);
  __builtin_prefetch(static_cast<const char*>(object) + other);
}

// Where a tensor has its storage and autograd's part, its type and its device.
void fetch_tensor(const c10::TensorImpl* tensor) { fetch(tensor, 16, sizeof(*tensor) - 16); }

const c10::StorageImpl* storage_of(const c10::TensorImpl& tensor) {
  return tensor.unsafe_storage().unsafeGetStorageImpl();
}

// Writes the storage of `tensor`, if it is on `device` and has bytes. False: Python must look.
bool add(const c10::TensorImpl& tensor, int64_t device, Storage*& end, bool& changed) {
  if (tensor.is_python_dispatch() || tensor.is_meta() || !tensor.has_storage()) return false;
  if (tensor.get_device() != device) return true;
  const auto* storage = storage_of(tensor);
  const Storage found{reinterpret_cast<int64_t>(storage), static_cast<int64_t>(storage->nbytes())};
  if (found.bytes == 0) return true;
  changed |= !(found == *end);
  *end++ = found;
  return true;
}

// at::Tensor is an intrusive_ptr, as wide as a pointer; its header takes a minute to compile.
const c10::TensorImpl* gradient(const c10::TensorImpl& tensor) {
  return *reinterpret_cast<c10::TensorImpl* const*>(&tensor.grad());
}

PyObject* type_of(PyObject* object) {
  auto* type = PyObject_Type(object);
  Py_DecRef(type);  // the object still has it
  return type;
}

const c10::TensorImpl* impl_of(PyObject* object, int impl_at) {
  return *reinterpret_cast<c10::TensorImpl* const*>(reinterpret_cast<const char*>(object) + impl_at);
}

}  // namespace

extern "C" {

// Of each tensor, or of its gradient, if there is one; the caller holds the GIL. All of them live while `freed` is an
// empty list. `types`: those whose memory is a storage of their own. `found` has place for one of each, and holds what
// was found last. Returns twice how many were written, and 1 more if one of them is new; -1: one is not that plain.
int64_t gpumon_storages(PyObject* const* tensors, int64_t count, PyObject* freed, bool gradients, int64_t device,
                        PyObject* const* types, int impl_at, Storage* found) {
  if (PyList_Size(freed) != 0) return -1;
  const c10::TensorImpl* next[AT_ONCE];
  auto* end = found;
  bool changed = false;
  try {
    for (int64_t first = 0; first < count; first += AT_ONCE) {
      const auto some = std::min(AT_ONCE, count - first);
      for (int64_t at = 0; at < some; ++at) fetch(tensors[first + at], 0, impl_at);
      for (int64_t at = 0; at < some; ++at) {
        const auto* type = type_of(tensors[first + at]);
        if (type != types[0] && type != types[1]) return -1;
        fetch_tensor(next[at] = impl_of(tensors[first + at], impl_at));
      }
      if (gradients) {
        for (int64_t at = 0; at < some; ++at) fetch(next[at]->autograd_meta(), 0, 40);
        for (int64_t at = 0; at < some; ++at) fetch_tensor(next[at] = gradient(*next[at]));
      }
      for (int64_t at = 0; at < some; ++at) fetch(storage_of(*next[at]), 48, 56);
      for (int64_t at = 0; at < some; ++at) {
        if (gradients && next[at] == c10::UndefinedTensorImpl::singleton()) continue;
        if (!add(*next[at], device, end, changed)) return -1;
      }
    }
  } catch (...) {  // symbolic sizes
    return -1;
  }
  return 2 * (end - found) + changed;
}

// The bytes of the different ones of `found` that are not among `owned`, which are all different. -1: no memory.
int64_t gpumon_beyond(const Storage* found, int64_t count, const int64_t* owned, int64_t owned_count) {
  const auto bits = std::bit_width(static_cast<uint64_t>(count)) + 1;
  std::vector<const Storage*> table;
  try {
    table.resize(size_t{1} << bits);
  } catch (...) {
    return -1;
  }
  const auto place = [&](int64_t identity) {  // that of `identity`, or the empty one where it would be
    auto at = (static_cast<uint64_t>(identity) * 0x9E3779B97F4A7C15U) >> (64 - bits);
    while (table[at] != nullptr && table[at]->identity != identity) at = (at + 1) & (table.size() - 1);
    return at;
  };
  int64_t total = 0;
  for (const auto* each = found; each != found + count; ++each) {
    auto& its = table[place(each->identity)];
    if (its == nullptr) total += (its = each)->bytes;
  }
  for (const auto* each = owned; each != owned + owned_count; ++each) {
    const auto* its = table[place(*each)];
    if (its != nullptr) total -= its->bytes;
  }
  return total;
}

bool gpumon_has(const Storage* found, int64_t count, int64_t identity) {
  return std::any_of(found, found + count, [&](const Storage& each) { return each.identity == identity; });
}

// Reads the storages of the tensors in the first value of a dict of dicts, on any device: of each the identity, bytes and
// address. Returns as gpumon_storages; -1: they are not that plain, are nested deeper, or are more than `room` has place
// for.
int64_t gpumon_first_entry(PyObject* state, PyObject* const* types, int impl_at, Storage* found, int64_t room) {
  intptr_t position = 0;
  PyObject *key, *first, *value;
  if (!(PyType_GetFlags(type_of(state)) & DICT)) return -1;
  if (!PyDict_Next(state, &position, &key, &first)) return 0;
  if (!(PyType_GetFlags(type_of(first)) & DICT)) return -1;
  auto* end = found;
  bool changed = false;
  position = 0;
  try {
    while (PyDict_Next(first, &position, &key, &value)) {
      auto* type = type_of(value);
      if (type != types[0] && type != types[1]) {
        if ((PyType_GetFlags(type) & CONTAINER) || PyType_IsSubtype(type, types[0])) return -1;
        continue;
      }
      const auto& tensor = *impl_of(value, impl_at);
      if (end + 2 > found + room || !add(tensor, tensor.get_device(), end, changed)) return -1;
      const Storage address{reinterpret_cast<int64_t>(storage_of(tensor)->data()), 0};
      changed |= !(address == *end);
      *end++ = address;
    }
  } catch (...) {
    return -1;
  }
  return 2 * (end - found) + changed;
}

// Whether the dicts that modules have under `name` hold exactly the values `known`, in order, beside `none`. The modules
// live while `freed` is an empty list; the values are only compared. False, too: Python must look.
bool gpumon_same_values(PyObject* const* modules, int64_t count, PyObject* freed, PyObject* name, PyObject* none,
                        PyObject* const* known, int64_t known_count) {
  int64_t next = 0;
  bool same = true;
  for (int64_t at = 0; at < count && same; ++at) {
    if (PyList_Size(freed) != 0) return false;  // a property may have run anything
    auto* module = modules[at];
    Py_IncRef(module);
    auto* values = PyObject_GetAttr(module, name);
    Py_DecRef(module);
    if (values == nullptr) {
      PyErr_Clear();
      return false;
    }
    same = PyType_GetFlags(type_of(values)) & DICT;
    intptr_t position = 0;
    PyObject *key, *value;
    while (same && PyDict_Next(values, &position, &key, &value)) {
      if (value != none) same = next < known_count && known[next++] == value;
    }
    Py_DecRef(values);
  }
  return same && next == known_count;
}
}
