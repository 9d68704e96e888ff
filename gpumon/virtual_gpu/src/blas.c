/* cuBLAS and cuBLASLt: handles are real, products are launches that change nothing.
 *
 * PyTorch hands cuBLAS a workspace from its own allocator, so those bytes are exact without anything done here; which
 * version allocates what, and when, is in the README. cuBLASLt is told that any algorithm needs no workspace.
 */
#include <string.h>

#include "gpu.h"
#include "stubs.h"

#define BLAS_NOT_INITIALIZED 1
#define BLAS_EXECUTION_FAILED 13
#define BLAS_VERSION 130401

typedef struct {
  int math_mode, pointer_mode;
  void *stream;
} blas_handle;

static int new_object(void **out) {
  *out = calloc(1, 64);
  return SUCCESS;
}

int vgpu_blas_launched(void *handle) {
  vgpu_forget_all_uploads(); /* which of its arguments it would have written is not known here */
  return vgpu_launch(((blas_handle *)handle)->stream) ? BLAS_EXECUTION_FAILED : SUCCESS;
}

/* ---- handles */

API int cublasCreate_v2(void **out) {
  if (vgpu_check_device()) return BLAS_NOT_INITIALIZED;
  *out = calloc(1, sizeof(blas_handle));
  return SUCCESS;
}

API int cublasDestroy_v2(void *handle) {
  free(handle);
  return SUCCESS;
}

API int cublasSetStream_v2(blas_handle *handle, void *stream) {
  handle->stream = stream;
  return SUCCESS;
}

API int cublasGetStream_v2(blas_handle *handle, void **stream) {
  *stream = handle->stream;
  return SUCCESS;
}

API int cublasSetMathMode(blas_handle *handle, int mode) {
  handle->math_mode = mode;
  return SUCCESS;
}

API int cublasGetMathMode(blas_handle *handle, int *mode) {
  *mode = handle->math_mode;
  return SUCCESS;
}

API int cublasSetPointerMode_v2(blas_handle *handle, int mode) {
  handle->pointer_mode = mode;
  return SUCCESS;
}

API int cublasGetPointerMode_v2(blas_handle *handle, int *mode) {
  *mode = handle->pointer_mode;
  return SUCCESS;
}

API int cublasGetVersion_v2(void *handle, int *version) {
  *version = BLAS_VERSION;
  return SUCCESS;
}

API int cublasGetProperty(int kind, int *value) {
  *value = kind == 0 ? BLAS_VERSION / 10000 : kind == 1 ? BLAS_VERSION / 100 % 100 : BLAS_VERSION % 100;
  return SUCCESS;
}

API size_t cublasGetCudartVersion(void) { return VGPU_CUDA_VERSION; }

/* ---- cuBLASLt */

API size_t cublasLtGetVersion(void) { return BLAS_VERSION; }
API int cublasLtCreate(void **out) { return cublasCreate_v2(out); }
API int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return new_object(out); }
API int cublasLtMatmulPreferenceCreate(void **out) { return new_object(out); }
API int cublasLtMatrixLayoutCreate(void **out, int type, u64 rows, u64 columns, int64_t stride) { return new_object(out); }

static int destroy(void *object) {
  free(object);
  return SUCCESS;
}

API int cublasLtMatmulDescDestroy(void *object) { return destroy(object); }
API int cublasLtMatmulPreferenceDestroy(void *object) { return destroy(object); }
API int cublasLtMatrixLayoutDestroy(void *object) { return destroy(object); }

API int cublasLtMatmulAlgoGetHeuristic(void *lt, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                       int wanted, matmul_heuristic *results, int *count) {
  memset(results, 0, sizeof *results);
  results->wavesCount = 1;
  *count = wanted > 0;
  return SUCCESS;
}

API int cublasLtMatmulAlgoCheck(void *lt, void *operation, void *a, void *b, void *c, void *d, const void *algorithm,
                                matmul_heuristic *result) {
  memset(result, 0, sizeof *result);
  result->wavesCount = 1;
  return SUCCESS;
}

API int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *out, size_t size,
                                             size_t *written) {
  memset(out, 0, size);
  if (written) *written = size;
  return SUCCESS;
}

API int cublasLtMatmul(void *lt, void *operation, const void *alpha, const void *a, void *a_layout, const void *b,
                       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                       const void *algorithm, void *workspace, size_t workspace_size, void *stream) {
  vgpu_forget_all_uploads();
  return vgpu_launch(stream) ? BLAS_EXECUTION_FAILED : SUCCESS;
}
