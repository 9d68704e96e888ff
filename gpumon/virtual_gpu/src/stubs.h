/* How a symbol answers that no source file defines; stubs.py chooses for each. Weak, so that any definition wins. */
#ifndef VGPU_STUBS_H
#define VGPU_STUBS_H

int vgpu_unsupported(const char *name, int status);
int vgpu_blas_launched(void *handle);
int vgpu_dnn_launched(void *handle);
int vgpu_launched(void);

#define VGPU_WEAK __attribute__((visibility("default"), weak))

#define VGPU_SUCCEEDS(name) \
  VGPU_WEAK int name(void) { return 0; }

#define VGPU_BLAS(name) \
  VGPU_WEAK int name(void *handle) { return vgpu_blas_launched(handle); }

#define VGPU_DNN(name) \
  VGPU_WEAK int name(void *handle) { return vgpu_dnn_launched(handle); }

#define VGPU_NCCL(name) \
  VGPU_WEAK int name(void) { return vgpu_launched(); }

/* The text of an error that only functions which are not supported can have returned. */
#define VGPU_ERROR_TEXT(name) \
  VGPU_WEAK const char *name(void) { return "not supported on the virtual GPU"; }

#define VGPU_UNSUPPORTED(name, status) \
  VGPU_WEAK int name(void) { return vgpu_unsupported(#name, status); }

#endif
