/* The three ways a symbol answers that no source file defines; stubs.py chooses one for each. */
#ifndef VGPU_STUBS_H
#define VGPU_STUBS_H

int vgpu_launched(void);
int vgpu_unsupported(const char *name, int status);

#define VGPU_WEAK __attribute__((visibility("default"), weak))
#define VGPU_SUCCEEDS(name) VGPU_WEAK int name(void) { return 0; }
#define VGPU_MATHEMATICS(name) VGPU_WEAK int name(void) { return vgpu_launched(); }
#define VGPU_UNSUPPORTED(name, status) \
  VGPU_WEAK int name(void) { return vgpu_unsupported(#name, status); }

#endif
