/* The few kernels that are computed: the arithmetic on 64-bit integers, and the joining of tensors, with which PyTorch
 * finds out how long the objects are that ranks send each other.
 *
 * They are known by name, and computed where their inputs are known bytes and few. How their parameters lie is as in
 * PyTorch's Loops.cuh, Reduce.cuh and Shape.cu since 2.4.
 */
#include <stdio.h>
#include <string.h>

#include "gpu.h"

#define PLACES 1024 /* a power of two; some 200 are taken */
#define FEW 64      /* numbers: more ranks, or objects in one list, are not added up */

typedef enum { NOTHING, SUM, MAXIMUM, ADD, ADD_CONSTANT, COMPARE, FILL, JOIN, ALL } purpose;

static struct {
  const void *host;
  purpose is;
  int element, batch; /* of JOIN */
} known_kernels[PLACES];
static int known_count;

static unsigned place(const void *host) { return (unsigned)(((uintptr_t)host >> 4) * 2654435761u) % PLACES; }

static purpose purpose_of(const char *name, int *element, int *batch) {
  const char *join = strstr(name, "CatArrayBatchedCopy");
  if (join) {
    const char *type = strstr(join, "OpaqueTypeILj");
    return type && sscanf(type, "OpaqueTypeILj%dEEEjLi1ELi%dE", element, batch) == 2 ? JOIN : NOTHING;
  }
  if (strstr(name, "reduce_kernelILi")) {
    if (strstr(name, "and_kernel_cuda")) return ALL;
    if (strstr(name, "ReduceOpIlNS0_14func_wrapper_tIlNS0_13MaxNanFunctorIlEEEE")) return MAXIMUM;
    if (strstr(name, "ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_functorIlllE")) return SUM;
    return NOTHING;
  }
  if (!strstr(name, "vectorized_elementwise_kernelILi") && !strstr(name, "unrolled_elementwise_kernelI")) return NOTHING;
  if (strstr(name, "BinaryFunctorIbbbNS0_15binary_internal10MulFunctorIbEEEE")) return ALL;
  if (strstr(name, "WithCast")) return NOTHING; /* its operands are of other types */
  if (strstr(name, "NS0_15CUDAFunctor_addIlEE")) return ADD;
  if (strstr(name, "NS0_21CUDAFunctorOnSelf_addIlEE")) return ADD_CONSTANT;
  if (strstr(name, "NS0_11FillFunctorIlEE")) return FILL;
  return strstr(name, "14CompareFunctorIlEE") ? COMPARE : NOTHING;
}

void vgpu_register_kernel(const void *host, const char *name) {
  int element = 0, batch = 0;
  purpose is = name ? purpose_of(name, &element, &batch) : NOTHING;
  if (is == NOTHING || known_count == PLACES / 2) return;
  unsigned at = place(host);
  while (known_kernels[at].host) at = (at + 1) % PLACES;
  known_kernels[at].host = host;
  known_kernels[at].is = is;
  known_kernels[at].element = element;
  known_kernels[at].batch = batch;
  known_count++;
}

static int is_known(const void *from, size_t size) { return size && vgpu_is_upload(from, size); }

/* ReduceOp: the operator, the identity, ReduceConfig (an element's size, inputs, outputs), …, source, result */
static int reduce(work_kind kind, void **parameters) {
  const char *operation = parameters[0];
  int element, inputs, outputs;
  memcpy(&element, operation + 16, sizeof element);
  memcpy(&inputs, operation + 20, sizeof inputs);
  memcpy(&outputs, operation + 24, sizeof outputs);
  if (element != sizeof(int64_t) || outputs != 1 || inputs < 1 || inputs > FEW) return 0;
  const uintptr_t *words = parameters[0];
  for (int i = 4; i < 190; i++) {
    region ignored;
    size_t size = (size_t)inputs * sizeof(int64_t);
    if (words[i] < PAGE_2M || words[i] % sizeof(int64_t) || !is_known((void *)words[i], size)) continue;
    if (!vgpu_is_device((void *)words[i + 1], &ignored)) continue;
    vgpu_work(&(local_work){kind, (void *)words[i + 1], sizeof(int64_t), {(void *)words[i]}, {size}, .known = 1});
    return 1;
  }
  return 0;
}

/* Not computed, but it is known what it writes: what lies around its parameters may point to anything, and to the size
 * of an object that is to be sent (torch 2.8 fills the tensor for the sizes right after its upload). */
static int fill(void **parameters) {
  void *const *data = parameters[2];
  vgpu_forget_upload(data[0], *(const int *)parameters[0] * sizeof(int64_t));
  return 1;
}

/* A number of elements, the functor, and the pointers: the result, then the operands */
static int elementwise(purpose is, void **parameters) {
  const int64_t *functor = parameters[1];
  void *const *data = parameters[2];
  int number = *(const int *)parameters[0];
  if (number < 1 || number > FEW) return 0;
  size_t size = (size_t)number * sizeof(int64_t);
  local_work work = {.to = data[0], .to_size = size, .from = {data[1]}, .from_size = {size}, .known = 1};
  if (!is_known(data[1], size)) return 0;
  if (is == ADD_CONSTANT) {
    work.kind = WORK_ADD_CONSTANT;
    work.constant = functor[0] * functor[1]; /* the other operand and its factor */
  } else {
    if (!is_known(data[2], size)) return 0;
    work.from[1] = data[2];
    work.from_size[1] = size;
    work.kind = is == ADD ? WORK_ADD : WORK_GREATER;
    if (is == ADD) work.factor = functor[0];
    else if (*(const int *)functor != 1) return 0; /* 0 to 3: ≥ > ≤ < */
    else work.to_size = (size_t)number;
  }
  vgpu_work(&work);
  return 1;
}

/* The result and a table of the inputs: addresses, where each begins in the result, its length there, its elements */
static int join(int element, int batch, unsigned inputs, void **parameters) {
  char *to = *(char **)parameters[0];
  const char *table = parameters[1];
  void *const *input = (void *const *)table;
  const unsigned *offset = (const unsigned *)(input + batch), *elements = offset + 2 * batch;
  size_t stride, all = 0;
  unsigned factor;
  memcpy(&factor, parameters[4], sizeof factor);
  stride = (size_t)factor * element;
  if (!inputs || inputs > (unsigned)batch) return 0;
  size_t start = offset[0] * stride;
  for (unsigned i = 0; i < inputs; i++) {
    size_t size = (size_t)elements[i] * element;
    if (elements[i] && (!is_known(input[i], size) || offset[i] * stride != start + all)) return 0;
    all += size;
  }
  if (all > MESSAGE_MAX) return 0;
  size_t before = start ? vgpu_known_bytes(to, start) : 0; /* a long list comes in several kernels */
  for (unsigned i = 0; i < inputs; i++) {
    size_t size = (size_t)elements[i] * element;
    if (size) vgpu_work(&(local_work){WORK_COPY, to + offset[i] * stride, size, {input[i]}, {size}, .known = 1});
  }
  if (before == start) vgpu_note_message(to, start + all);
  return 1;
}

static unsigned find(const void *kernel) {
  unsigned at = place(kernel);
  while (known_kernels[at].host && known_kernels[at].host != kernel) at = (at + 1) % PLACES;
  return at;
}

/* A reduction by `and`, or the product of two truths: `tensor.all()` and `tensor.isfinite()`, which is such a product
 * (x == x and |x| != inf), are how code asks whether everything is as it should be. */
int vgpu_is_all(const void *kernel) { return known_kernels[find(kernel)].is == ALL; }

int vgpu_compute(const void *kernel, unsigned inputs, void **parameters) {
  unsigned at = find(kernel);
  if (!parameters) return 0;
  switch (known_kernels[at].is) {
    case NOTHING:
    case ALL: return 0;
    case SUM: return reduce(WORK_SUM, parameters);
    case MAXIMUM: return reduce(WORK_MAX, parameters);
    case FILL: return fill(parameters);
    case JOIN: return join(known_kernels[at].element, known_kernels[at].batch, inputs, parameters);
    default: return elementwise(known_kernels[at].is, parameters);
  }
}
