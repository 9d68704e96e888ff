/* Sums, products, extremes and means of what ranks said, for the types that are told apart by size and sign. */
#include "waiting.h"

enum { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN }; /* ncclRedOp_t; what is made at run time is not computed */

#define REDUCE(type)                                                                                   \
  {                                                                                                    \
    type *all = sum;                                                                                   \
    const type *one = other;                                                                           \
    for (size_t i = 0; i < size / sizeof *all; i++) {                                                  \
      if (first) all[i] = one[i];                                                                      \
      else if (operation == PRODUCT) all[i] *= one[i];                                                 \
      else if (operation == MAXIMUM) all[i] = one[i] > all[i] ? one[i] : all[i];                       \
      else if (operation == MINIMUM) all[i] = one[i] < all[i] ? one[i] : all[i];                       \
      else all[i] += one[i];                                                                           \
    }                                                                                                  \
    return 1;                                                                                          \
  }

/* By ncclDataType_t; half precision is not computed. */
int vgpu_reduce(void *sum, const void *other, size_t size, int type, int operation, int first) {
  if (operation > MEAN) return 0;
  switch (type) {
    case 0: REDUCE(int8_t)
    case 1: REDUCE(uint8_t)
    case 2: REDUCE(int32_t)
    case 3: REDUCE(uint32_t)
    case 4: REDUCE(int64_t)
    case 5: REDUCE(uint64_t)
    case 7: REDUCE(float)
    case 8: REDUCE(double)
    default: return 0;
  }
}

#define DIVIDE(type)                                                                  \
  {                                                                                   \
    type *all = sum;                                                                  \
    for (size_t i = 0; i < size / sizeof *all; i++) all[i] /= (type)ranks;            \
    return 1;                                                                         \
  }

int vgpu_finish_reduction(void *sum, size_t size, int type, int operation, int ranks) {
  if (operation != MEAN) return 1;
  switch (type) {
    case 0: DIVIDE(int8_t)
    case 1: DIVIDE(uint8_t)
    case 2: DIVIDE(int32_t)
    case 3: DIVIDE(uint32_t)
    case 4: DIVIDE(int64_t)
    case 5: DIVIDE(uint64_t)
    case 7: DIVIDE(float)
    default: DIVIDE(double)
  }
}
