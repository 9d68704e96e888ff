/* cuDNN's recurrent networks (cudnn_adv.h): shapes, sizes and places of the weights; execution is a launch.
 *
 * The weights are the sum of what the documentation of cudnnGetRNNWeightParams lists: matrices first, then biases.
 * Kept for backward are the gates and the cell of each time step, and each layer's outputs that the next one reads: what
 * backward cannot do without. A real cuDNN may keep more; how much is its own secret, as are its workspaces, which are 0
 * here.
 */
#include <stdint.h>

#include "gpu.h"

enum { LSTM = 2, GRU = 3 };
enum { NO_BIAS = 0, DOUBLE_BIAS = 2 };

typedef struct {
  int cell, bias, directions, element, input, hidden, projected, layers;
} network;

typedef struct {
  int64_t tokens; /* of all sequences */
} sequences;

typedef struct {
  int type, dims[3];
} shape;

static int element_bytes(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; }

API int cudnnCreateRNNDescriptor(network **out) { return (*out = calloc(1, sizeof **out)) ? SUCCESS : 2; }
API int cudnnCreateRNNDataDescriptor(sequences **out) { return (*out = calloc(1, sizeof **out)) ? SUCCESS : 2; }

API int cudnnDestroyRNNDescriptor(network *it) {
  free(it);
  return SUCCESS;
}

API int cudnnDestroyRNNDataDescriptor(sequences *it) {
  free(it);
  return SUCCESS;
}

API int cudnnSetRNNDescriptor_v8(network *it, int algorithm, int cell, int bias, int direction, int input_mode, int type,
                                 int precision, int math, int32_t input, int32_t hidden, int32_t projected,
                                 int32_t layers, void *dropout, uint32_t flags) {
  *it = (network){cell, bias, direction + 1, element_bytes(type), input, hidden,
                  projected > 0 && projected < hidden ? projected : 0, layers};
  return SUCCESS;
}

API int cudnnSetRNNDataDescriptor(sequences *it, int type, int layout, int longest, int batch, int size,
                                  const int *lengths, void *padding) {
  it->tokens = 0;
  for (int i = 0; i < batch; i++) it->tokens += lengths[i];
  return SUCCESS;
}

static int gates(const network *it) { return it->cell == LSTM ? 4 : it->cell == GRU ? 3 : 1; }
static int output(const network *it) { return it->projected ? it->projected : it->hidden; }

/* Columns of a layer's input matrices. */
static int width(const network *it, int layer) { return layer ? output(it) * it->directions : it->input; }

/* Elements of one layer's matrices, in one direction. */
static int64_t matrices(const network *it, int layer) {
  int64_t one = (int64_t)it->hidden * (width(it, layer) + output(it));
  return gates(it) * one + (int64_t)it->projected * it->hidden;
}

static int biases(const network *it) { return it->bias == NO_BIAS ? 0 : it->bias == DOUBLE_BIAS ? 2 : 1; }

/* Elements before the matrices of a layer and direction; of all, where `pseudo` is their number. */
static int64_t before(const network *it, int pseudo) {
  int64_t sum = 0;
  for (int i = 0; i < pseudo; i++) sum += matrices(it, i / it->directions);
  return sum;
}

API int cudnnGetRNNWeightSpaceSize(void *handle, const network *it, size_t *size) {
  int all = it->layers * it->directions;
  int64_t elements = before(it, all) + (int64_t)all * biases(it) * gates(it) * it->hidden;
  *size = elements * it->element;
  return SUCCESS;
}

static void describe(shape *it, const network *of, int rows, int columns) {
  it->type = of->element == 8 ? 1 : of->element == 2 ? 2 : 0;
  it->dims[0] = 1;
  it->dims[1] = rows;
  it->dims[2] = columns;
}

API int cudnnGetRNNWeightParams(void *handle, const network *it, int32_t pseudo, size_t size, char *space, int32_t id,
                                shape *matrix, void **matrix_at, shape *bias, void **bias_at) {
  int layer = pseudo / it->directions, count = gates(it), columns = width(it, layer);
  int64_t one = (int64_t)it->hidden * columns, recurrent = (int64_t)it->hidden * output(it);
  if (matrix) {
    int64_t at = before(it, pseudo);
    if (id < count) {
      at += id * one;
      describe(matrix, it, it->hidden, columns);
    } else if (id < 2 * count) {
      at += count * one + (id - count) * recurrent;
      describe(matrix, it, it->hidden, output(it));
    } else { /* the projection */
      at += count * (one + recurrent);
      describe(matrix, it, it->projected, it->hidden);
    }
    *matrix_at = space + at * it->element;
  }
  if (bias) {
    int64_t at = before(it, it->layers * it->directions) + ((int64_t)pseudo * biases(it) * count + id) * it->hidden;
    describe(bias, it, it->hidden, 1);
    *bias_at = space + at * it->element;
  }
  return SUCCESS;
}

/* Of those that cudnnGetRNNWeightParams described: nobody else asks. */
API int cudnnGetTensorNdDescriptor(const shape *it, int wanted, int *type, int *count, int *dims, int *strides) {
  *type = it->type;
  *count = 3;
  for (int i = 0, stride = it->dims[1] * it->dims[2]; i < 3 && i < wanted; i++) {
    dims[i] = it->dims[i];
    strides[i] = stride;
    stride = i + 1 < 3 ? stride / it->dims[i + 1] : 1;
  }
  return SUCCESS;
}

API int cudnnGetRNNTempSpaceSizes(void *handle, const network *it, int mode, const sequences *x, size_t *workspace,
                                  size_t *reserve) {
  int64_t cell = gates(it) + (it->cell == LSTM || it->cell == GRU);
  int64_t inside = x->tokens * it->layers * it->directions * it->hidden * cell;
  int64_t between = x->tokens * (it->layers - 1) * it->directions * output(it);
  if (workspace) *workspace = 0;
  if (reserve) *reserve = mode ? (inside + between) * it->element : 0;
  return SUCCESS;
}
