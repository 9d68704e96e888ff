/* How many ranks a communicator has that is split off another.
 *
 * NCCL asks every rank; here there may be no other. From 2.9 on PyTorch hands the ranks to a C++ function that splits,
 * and this one is asked first. Before, the colour is made from the ranks, so the group is the one that gives this colour
 * and has this rank at the place that the key names. Looked through are all groups of a small world; in a larger one
 * those of a mesh: evenly spaced ranks, and evenly spaced runs of them; ascending, as PyTorch had them.
 */
#define _GNU_SOURCE
#include "nccl_groups.h"

#include <dlfcn.h>
#include <stdint.h>

#include "gpu.h"

#define SMALL_WORLD 20

/* ---- told by PyTorch: the names are those of C++, the first argument is where the result goes */

typedef struct {
  const int *begin, *end, *room;
} vector_of_int;
typedef void *split_function(void *result, void *group, const void *store, const vector_of_int *ranks, const void *options);

static __thread int told; /* ranks of the group that is being made on this thread */

static void *split(const char *name, void *result, void *group, const void *store, const vector_of_int *ranks,
                   const void *options) {
  /* a library that Python loaded is not among those that RTLD_NEXT looks through */
  split_function *torchs = (split_function *)dlsym(dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD), name);
  told = (int)(ranks->end - ranks->begin);
  void *returned = torchs(result, group, store, ranks, options);
  told = 0;
  return returned;
}

#define SPLIT(name)                                                                                             \
  API void *name(void *result, void *group, const void *store, const vector_of_int *ranks, const void *options) { \
    return split(#name, result, group, store, ranks, options);                                                  \
  }

SPLIT(_ZN4c10d16ProcessGroupNCCL5splitERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEERKSt6vectorIiSaIiEERKNS2_INS_7Backend7OptionsENS5_ISG_EEEE)
SPLIT(_ZN4c10d5nccl216ProcessGroupNCCL5splitERKN3c1013intrusive_ptrINS_5StoreENS2_6detail34intrusive_target_default_null_typeIS4_EEEERKSt6vectorIiSaIiEERKNS3_INS_7Backend7OptionsENS6_ISH_EEEE)

/* ---- told by the colour: a hash of the ranks as a tuple of ints, as CPython has it from 3.8 on */

typedef struct {
  uint64_t hash;
  int count;
} ranks_hash;

static const uint64_t prime1 = 11400714785074694791u, prime2 = 14029467366897019727u, prime5 = 2870177450012600261u;

static ranks_hash nobody(void) { return (ranks_hash){prime5, 0}; }

static ranks_hash with(ranks_hash ranks, int rank) {
  ranks.hash += (uint64_t)rank * prime2;
  ranks.hash = (ranks.hash << 31 | ranks.hash >> 33) * prime1;
  ranks.count++;
  return ranks;
}

static int gives(ranks_hash ranks, int colour) {
  uint64_t hash = ranks.hash + ((uint64_t)ranks.count ^ prime5 ^ 3527539u);
  if ((int64_t)hash < 0) hash = -hash;
  return colour == (int)(hash % (1u << 31));
}

/* ---- groups */

typedef struct {
  int world, rank, key, colour;
} wanted;

/* Any ranks from `next` on, after those so far. */
static int any_group(const wanted *w, ranks_hash so_far, int next) {
  int before = so_far.count < w->key, here = so_far.count == w->key;
  for (int rank = here ? w->rank : next; rank < (before || here ? w->rank + here : w->world); rank++) {
    ranks_hash longer = with(so_far, rank);
    if (longer.count > w->key && gives(longer, w->colour)) return longer.count;
    int found = any_group(w, longer, rank + 1);
    if (found) return found;
  }
  return 0;
}

/* Runs of `length` ranks, `step` apart, that begin `stride` apart. */
static int runs(const wanted *w, int length, int step, int stride) {
  int64_t first = w->rank - (int64_t)(w->key / length) * stride - (int64_t)(w->key % length) * step;
  if (first < 0) return 0;
  ranks_hash ranks = nobody();
  for (int64_t start = first; start + (int64_t)(length - 1) * step < w->world; start += stride) {
    for (int i = 0; i < length; i++) ranks = with(ranks, (int)(start + (int64_t)i * step));
    if (ranks.count > w->key && gives(ranks, w->colour)) return ranks.count;
  }
  return 0;
}

static int mesh_group(const wanted *w) {
  for (int stride = 1; stride <= w->world; stride++) {
    int found = runs(w, 1, 1, stride);
    if (found) return found;
  }
  for (int step = 1; step <= w->world / 4; step++) {
    for (int length = 2; length <= w->world / 2 / step; length++) {
      for (int stride = 2 * length * step; stride <= w->world; stride += length * step) {
        int found = runs(w, length, step, stride);
        if (found) return found;
      }
    }
  }
  return 0;
}

int vgpu_nccl_told(void) {
  int ranks = told;
  told = 0; /* here too, for an exception passes the end of split() by */
  return ranks;
}

int vgpu_nccl_group(int world, int rank, int key, int colour) {
  wanted w = {world, rank, key, colour};
  if (key < 0 || key > rank) return 0;
  return world <= SMALL_WORLD ? any_group(&w, nobody(), 0) : mesh_group(&w);
}
