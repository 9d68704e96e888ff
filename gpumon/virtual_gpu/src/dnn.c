/* cuDNN: descriptors are dummies, one engine and one algorithm are always found, execution is a launch.
 *
 * Workspaces are 0 bytes: what a real cuDNN would choose to use is its own secret, and varies by version and device.
 */
#include <string.h>

#include "gpu.h"
#include "stubs.h"

#define DNN_EXECUTION_FAILED 5000

/* cudnnConvolutionFwdAlgoPerf_t and its two siblings */
typedef struct {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math_type, reserved[3];
} algorithm_performance;

typedef struct {
  void *stream;
} dnn_handle;

static int new_object(void **out) {
  *out = calloc(1, 256);
  return SUCCESS;
}

int vgpu_dnn_launched(void *handle) {
  vgpu_forget_all_uploads();
  return vgpu_launch(((dnn_handle *)handle)->stream) ? DNN_EXECUTION_FAILED : SUCCESS;
}

/* ---- handles and descriptors */

#define CREATES(name) \
  API int name(void **out) { return new_object(out); }

CREATES(cudnnCreate)
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateTensorDescriptor)
CREATES(cudnnCreateSpatialTransformerDescriptor)

API int cudnnSetStream(dnn_handle *handle, void *stream) {
  handle->stream = stream;
  return SUCCESS;
}

API int cudnnGetStream(dnn_handle *handle, void **stream) {
  *stream = handle->stream;
  return SUCCESS;
}

API size_t cudnnGetCudartVersion(void) { return VGPU_CUDA_VERSION; }

/* The version this torch was built with: it refuses an older one. */
API size_t cudnnGetVersion(void) { return VGPU_CUDNN_VERSION; }

/* libraryPropertyType: major, minor, patch level */
API int cudnnGetProperty(int kind, int *value) {
  *value = VGPU_CUDNN_VERSION / (kind == 0 ? 10000 : kind == 1 ? 100 : 1) % 100;
  return SUCCESS;
}

API const char *cudnnGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case 3000: return "CUDNN_STATUS_NOT_SUPPORTED";
    default: return "CUDNN_STATUS_EXECUTION_FAILED";
  }
}

API void cudnnGetLastErrorString(char *text, size_t size) {
  if (size) text[0] = 0;
}

/* ---- graph API, which convolutions go through in newer versions */

API int cudnnBackendCreateDescriptor(int type, void **out) { return new_object(out); }

API int cudnnBackendDestroyDescriptor(void *object) {
  free(object);
  return SUCCESS;
}

API int cudnnBackendFinalize(void *object) { return SUCCESS; }
API int cudnnBackendExecute(void *handle, void *plan, void *pack) { return vgpu_dnn_launched(handle); }

API int cudnnBackendSetAttribute(void *object, int name, int type, int64_t count, const void *values) {
  return SUCCESS;
}

/* Bytes of one element, by cudnnBackendAttributeType_t */
static size_t element_size(int type) {
  switch (type) {
    case 2: case 24: return 1;                 /* boolean, char */
    case 0: case 3: case 5: case 6: return 8;  /* handle, int64, double, pointer */
    default: return 4;
  }
}

API int cudnnBackendGetAttribute(void *object, int name, int type, int64_t wanted, int64_t *count, void *out) {
  int64_t found = wanted;
  if (type == 11 || type == 19) found = 0; /* numerical and behaviour notes: none */
  else if (type == 15) found = 1;          /* one engine configuration */
  else if (out) memset(out, 0, (size_t)wanted * element_size(type));
  if (count) *count = found;
  return SUCCESS;
}

/* ---- legacy API */

static int one_algorithm(int *count, algorithm_performance *results) {
  memset(results, 0, sizeof *results);
  results->algorithm = 1;
  *count = 1;
  return SUCCESS;
}

#define FINDS(name) \
  API int name(void *h, void *a, void *b, void *c, void *d, int wanted, int *count, algorithm_performance *results) { \
    return one_algorithm(count, results); \
  }

#define MEASURES(name) \
  API int name(void *h, void *a, void *ap, void *b, void *bp, void *c, void *d, void *dp, int wanted, int *count, \
               algorithm_performance *results, void *workspace, size_t size) { \
    return one_algorithm(count, results); \
  }

#define NO_WORKSPACE(name) \
  API int name(void *h, void *a, void *b, void *c, void *d, int algorithm, size_t *size) { \
    *size = 0; \
    return SUCCESS; \
  }

FINDS(cudnnGetConvolutionForwardAlgorithm_v7)
FINDS(cudnnGetConvolutionBackwardDataAlgorithm_v7)
FINDS(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
MEASURES(cudnnFindConvolutionForwardAlgorithmEx)
MEASURES(cudnnFindConvolutionBackwardDataAlgorithmEx)
MEASURES(cudnnFindConvolutionBackwardFilterAlgorithmEx)
NO_WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize)
NO_WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize)
NO_WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize)

API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operations, void *x, void *z,
                                                                 void *y, void *scale, void *activation, size_t *size) {
  *size = 0;
  return SUCCESS;
}

API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operations, void *x, void *y, void *dy,
                                                          void *dz, void *dx, void *scale, void *activation,
                                                          size_t *size) {
  *size = 0;
  return SUCCESS;
}

API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operations, void *activation,
                                                             void *x, size_t *size) {
  *size = 0;
  return SUCCESS;
}

API int cudnnDropoutGetStatesSize(void *h, size_t *size) {
  *size = MIB;
  return SUCCESS;
}
