// The storages of many tensors in one call, for native_storages.py. In Python each tensor takes 0.2 to 1.3 µs.
//
// A training has emptied the caches before each look, so what is read next is fetched ahead, for many tensors at once.
// Python's headers are often not installed: see quiet_hooks.cpp.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <utility>

using PyObject = struct _object;
extern "C" {
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
unsigned long PyType_GetFlags(PyObject*);
void PyErr_Clear();
int PyErr_ExceptionMatches(PyObject*);
extern PyObject* PyExc_AttributeError;
int PyType_IsSubtype(PyObject*, PyObject*);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);
intptr_t PyDict_Size(PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
PyObject* PyWeakref_GetObject(PyObject*);
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

// A new reference. Null: there is none, or a property has raised, as at Ctrl-C: ctypes raises that in Python.
PyObject* attribute(PyObject* object, PyObject* name) {
  Py_IncRef(object);  // a property may drop it
  auto* value = PyObject_GetAttr(object, name);
  Py_DecRef(object);
  if (value == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
  return value;
}

const c10::TensorImpl* impl_of(PyObject* object, int impl_at) {
  return *reinterpret_cast<c10::TensorImpl* const*>(reinterpret_cast<const char*>(object) + impl_at);
}

// Tensors by address. All of them live while `freed` is an empty list.
struct Group {
  PyObject* const* tensors;
  int64_t count;
  PyObject* freed;
};

// What is plain: types whose memory is a storage of their own, and where such an object has its TensorImpl.
struct Plain {
  PyObject* types[2];
  int64_t impl_at;

  bool is(PyObject* type) const { return type == types[0] || type == types[1]; }
};

// Writes the storages of a group, or of its gradients. False: Python must look.
bool read_group(const Group& group, bool gradients, const Plain& plain, int64_t device, Storage*& end, bool& changed) {
  if (PyList_Size(group.freed) != 0) return false;
  const c10::TensorImpl* next[AT_ONCE];
  for (int64_t first = 0; first < group.count; first += AT_ONCE) {
    const auto some = std::min(AT_ONCE, group.count - first);
    auto* const* tensors = group.tensors + first;
    for (int64_t at = 0; at < some; ++at) fetch(tensors[at], 0, plain.impl_at);
    for (int64_t at = 0; at < some; ++at) {
      if (!plain.is(type_of(tensors[at]))) return false;
      fetch_tensor(next[at] = impl_of(tensors[at], plain.impl_at));
    }
    if (gradients) {
      for (int64_t at = 0; at < some; ++at) fetch(next[at]->autograd_meta(), 0, 40);
      for (int64_t at = 0; at < some; ++at) fetch_tensor(next[at] = gradient(*next[at]));
    }
    for (int64_t at = 0; at < some; ++at) fetch(storage_of(*next[at]), 0, 56);
    for (int64_t at = 0; at < some; ++at) {
      if (gradients && next[at] == c10::UndefinedTensorImpl::singleton()) continue;
      if (!add(*next[at], device, end, changed)) return false;
    }
  }
  return true;
}

// In a table of `size`, a power of two: the place of `identity`, or the empty one where it would be.
Storage& place(Storage* table, int64_t size, int64_t identity) {
  auto at = (static_cast<uint64_t>(identity) * 0x9E3779B97F4A7C15U) >> 32;
  while (at &= size - 1, table[at].identity != identity && table[at].identity != 0) ++at;
  return table[at];
}

}  // namespace

extern "C" {

// The fields of native_storages._Reading. `found` has place for one storage of each tensor and each gradient, and holds
// `found_count` that were found last; -1: unknown.
struct Reading {
  Plain plain;
  int64_t device;
  Group tensors;
  Group parameters;  // whose gradients count
  Storage* found;
  int64_t found_count;
};

// The caller holds the GIL. 1: others were found than last; 0: the same; -1: one is not that plain.
int64_t gpumon_read(Reading* reading) {
  const auto before = std::exchange(reading->found_count, -1);
  auto* end = reading->found;
  bool changed = false;
  const auto& plain = reading->plain;
  try {
    if (!read_group(reading->tensors, false, plain, reading->device, end, changed) ||
        !read_group(reading->parameters, true, plain, reading->device, end, changed)) {
      return -1;
    }
  } catch (...) {  // symbolic sizes
    return -1;
  }
  reading->found_count = end - reading->found;
  return changed || reading->found_count != before;
}

// The bytes of the different ones of `found` that are not among `owned`, which are all different. `table` has place for
// twice as many as were found, a power of two; then it holds them, by identity.
int64_t gpumon_beyond(const Storage* found, int64_t count, const int64_t* owned, int64_t owned_count, Storage* table,
                      int64_t size) {
  std::fill(table, table + size, Storage{});
  int64_t total = 0;
  for (const auto* each = found; each != found + count; ++each) {
    auto& its = place(table, size, each->identity);
    if (its.identity == 0) total += (its = *each).bytes;
  }
  for (const auto* each = owned; each != owned + owned_count; ++each) total -= place(table, size, *each).bytes;
  return total;
}

bool gpumon_has(const Storage* found, int64_t count, int64_t identity) {
  return std::any_of(found, found + count, [&](const Storage& each) { return each.identity == identity; });
}

// The fields of native_storages._First.
struct First {
  Plain plain;
  PyObject* optimizer;  // a weak reference
  PyObject* name;       // "state"
  PyObject* state;      // only compared
  int64_t size;         // -1: unknown
  Storage* found;
  int64_t found_count;
  int64_t room;
};

// Whether a dict of dicts is the same one, as large, and its first value's tensors have the storages, on any device, and
// addresses that they had in the last call. False, too: they are not that plain, are nested deeper, or are too many.
bool gpumon_same_first(First* first, PyObject* state) {
  intptr_t position = 0;
  PyObject *key, *value, *entry;
  if (!(PyType_GetFlags(type_of(state)) & DICT)) {
    first->size = -1;
    return false;
  }
  const auto size = std::exchange(first->size, -1);
  const auto* before = std::exchange(first->state, state);
  auto* end = first->found;
  bool changed = false;
  if (PyDict_Next(state, &position, &key, &entry)) {
    if (!(PyType_GetFlags(type_of(entry)) & DICT)) return false;
    position = 0;
    try {
      while (PyDict_Next(entry, &position, &key, &value)) {
        auto* type = type_of(value);
        if (!first->plain.is(type)) {
          if ((PyType_GetFlags(type) & CONTAINER) || PyType_IsSubtype(type, first->plain.types[0])) return false;
          continue;
        }
        const auto& tensor = *impl_of(value, first->plain.impl_at);
        if (end + 2 > first->found + first->room || !add(tensor, tensor.get_device(), end, changed)) return false;
        const Storage address{reinterpret_cast<int64_t>(storage_of(tensor)->data()), 0};
        changed |= !(address == *end);
        *end++ = address;
      }
    } catch (...) {
      return false;
    }
  }
  first->size = PyDict_Size(state);
  const auto count = std::exchange(first->found_count, end - first->found);
  return !changed && before == state && size == first->size && count == first->found_count;
}

// The fields of native_storages._Alive. `references` are weak ones to the Python objects of storages, which live as long
// as these.
struct Alive {
  PyObject** references;
  int64_t* identities;
  int64_t count;
  int64_t device;
  const int64_t* taken;  // identities that do not count
  int64_t taken_count;
  Storage* found;  // has place for all
  int64_t found_count;
  int64_t bytes;  // of those
};
}

namespace {

// Finds those on `device` that are not taken, and leaves out of the list those that live no more. False: Python must
// look.
template <typename Taken>
bool read_alive(Alive& alive, PyObject* none, const Taken& taken) {
  auto* end = alive.found;
  int64_t living = 0;
  for (int64_t at = 0; at < alive.count; ++at) fetch(alive.references[at], 0, 16);
  for (int64_t at = 0; at < alive.count; ++at) {
    if (PyWeakref_GetObject(alive.references[at]) == none) continue;
    const auto identity = alive.identities[at];
    fetch(reinterpret_cast<void*>(identity), 0, 56);
    alive.references[living] = alive.references[at];
    alive.identities[living++] = identity;
  }
  alive.count = living;
  alive.bytes = 0;
  for (int64_t at = 0; at < living; ++at) {
    const auto identity = alive.identities[at];
    const auto& storage = *reinterpret_cast<const c10::StorageImpl*>(identity);
    const auto device = storage.device();
    if ((device.is_cpu() ? -1 : device.index()) != alive.device || taken(identity)) continue;
    try {
      *end++ = {identity, static_cast<int64_t>(storage.nbytes())};
    } catch (...) {  // a symbolic size
      return false;
    }
    alive.bytes += end[-1].bytes;
  }
  alive.found_count = end - alive.found;
  return true;
}

}  // namespace

extern "C" {

bool gpumon_alive(Alive* alive, PyObject* none) {
  const auto *first = alive->taken, *last = first + alive->taken_count;
  return read_alive(*alive, none, [=](int64_t identity) { return std::find(first, last, identity) != last; });
}

// What the modules' dicts of one name are expected to hold.
struct Values {
  PyObject* name;
  PyObject* const* known;
  int64_t count;
};

// The fields of native_storages._Lists. The modules live while `freed` is an empty list; the values are only compared.
struct Lists {
  PyObject* const* modules;
  int64_t count;
  PyObject* freed;
  Values names[2];
  PyObject* none;
};

// Whether the dicts that modules have under these names hold exactly the known values, in order, beside `none`. False,
// too: Python must look.
bool gpumon_same_lists(const Lists* lists) {
  const auto& [modules, count, freed, names, none] = *lists;
  int64_t next[2] = {};
  bool same = true;
  for (int64_t at = 0; at < count; ++at) {
    if (at % AT_ONCE == 0) {
      for (int64_t ahead = at; ahead < std::min(at + AT_ONCE, count); ++ahead) fetch(modules[ahead], -24, 8);
    }
    for (int64_t of = 0; of < 2; ++of) {
      if (PyList_Size(freed) != 0) return false;  // a property may have run anything
      const auto& [name, known, known_count] = names[of];
      auto* values = attribute(modules[at], name);
      if (values == nullptr) return false;
      same = PyType_GetFlags(type_of(values)) & DICT;
      intptr_t position = 0;
      PyObject *key, *value;
      while (same && PyDict_Next(values, &position, &key, &value)) {
        if (value != none) same = next[of] < known_count && known[next[of]++] == value;
      }
      Py_DecRef(values);
      if (!same) return false;
    }
  }
  for (int64_t of = 0; of < 2; ++of) same &= next[of] == names[of].count;
  return same;
}

struct Result {
  int64_t beyond;  // bytes of what the first reading found that are not owned; -1: unknown, and so is the table
  int64_t given_count;  // -1: Python must look
  int64_t given_bytes;
  int64_t alive_read;
};

// The fields of native_storages._Look. `owned` is sorted, and holds all that the readings but the first one found, and
// more. `table` has place for what the first one can find, as in gpumon_beyond.
struct Look {
  Lists* lists;
  Reading* const* readings;
  int64_t count;
  First* const* firsts;
  int64_t first_count;
  const int64_t* owned;
  int64_t owned_count;
  Storage* table;
  int64_t size;
  Storage* given;  // storages of the inputs
  int64_t room;
  Result* result;
};
}

namespace {

// Finds the storages of tensors, named by weak references in a list, that are neither owned nor gradients. False: Python
// must look.
template <typename Taken>
bool read_given(Look& look, PyObject* references, const Taken& taken) {
  const auto count = PyList_Size(references);
  const auto& reading = *look.readings[0];
  auto* end = look.given;
  bool changed = false;
  look.result->given_bytes = 0;
  if (count > look.room) return false;
  try {
    for (intptr_t at = 0; at < count; ++at) {
      auto* tensor = PyWeakref_GetObject(PyList_GetItem(references, at));
      if (tensor == look.lists->none) continue;
      if (!reading.plain.is(type_of(tensor))) return false;
      const auto& impl = *impl_of(tensor, reading.plain.impl_at);
      auto* its = end;
      if (gradient(impl) != c10::UndefinedTensorImpl::singleton()) return false;
      if (!add(impl, reading.device, end, changed)) return false;
      if (its == end) continue;
      if (taken(its->identity) || std::find(look.given, its, *its) != its) {
        end = its;
      } else {
        look.result->given_bytes += its->bytes;
      }
    }
  } catch (...) {
    return false;
  }
  look.result->given_count = end - look.given;
  return true;
}

}  // namespace

extern "C" {

// Reads several at once, with the states of the optimizers of `firsts`, and before all, if so asked, the lists. Returns a
// bit for each reading that found others than last, and the next higher one if a state is another; -1: Python must look;
// -2: at the lists, and nothing was read.
// Also reads the `inputs`, a list of weak references, and `alive`, if not null: what is not owned, a gradient or an input.
int64_t gpumon_look(Look* look, bool lists, PyObject* inputs, Alive* alive) {
  int64_t changed = 0;
  auto& result = *look->result;
  result.given_count = -1;
  result.alive_read = 0;
  if (lists && !gpumon_same_lists(look->lists)) return -2;
  for (int64_t at = 0; at < look->count; ++at) {
    const auto read = gpumon_read(look->readings[at]);
    if (read < 0) return -1;
    changed |= read << at;
  }
  for (int64_t at = 0; at < look->first_count; ++at) {
    auto& first = *look->firsts[at];
    auto* optimizer = PyWeakref_GetObject(first.optimizer);
    if (optimizer == look->lists->none) return -1;
    auto* state = attribute(optimizer, first.name);
    if (state == nullptr) return -1;
    if (!gpumon_same_first(&first, state)) changed |= int64_t{1} << look->count;
    Py_DecRef(state);
  }
  const auto& first = *look->readings[0];
  const auto *owned = look->owned, *owned_end = owned + look->owned_count;
  if (changed || result.beyond < 0) {
    result.beyond =
        gpumon_beyond(first.found, first.found_count, owned, look->owned_count, look->table, look->size);
  }
  const auto has_owner = [=](int64_t identity) {
    return place(look->table, look->size, identity).identity != 0 || std::binary_search(owned, owned_end, identity);
  };
  if (read_given(*look, inputs, has_owner) && alive != nullptr) {
    const auto *given = look->given, *given_end = given + result.given_count;
    alive->device = first.device;
    result.alive_read = read_alive(*alive, look->lists->none, [=](int64_t identity) {
      return has_owner(identity) ||
             std::any_of(given, given_end, [=](const Storage& each) { return each.identity == identity; });
    });
  }
  return changed;
}
}
