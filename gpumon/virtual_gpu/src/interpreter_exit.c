/* One mend for a race between PyTorch and Python that a device this fast meets often: see pthread_exit below. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "gpu.h"

static int interpreter_finalizes(void) {
  int (*asks)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing"); /* Python 3.13 */
  if (!asks) asks = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  return asks && asks();
}

/* When a program ends right after backward(), autograd's device thread may still be destroying a node that holds a
 * Python hook. It asks for the interpreter, which is finalizing, and Python before 3.14 answers with pthread_exit: that
 * unwinds the thread through PyTorch's noexcept destructors, and C++ aborts the whole process with "terminate called
 * without an active exception". Python 3.14 lets such a thread wait for ever while the process exits; so does this,
 * and PyTorch, which would wait 10 s for the thread, is told to wait a tenth. */
API void pthread_exit(void *value) {
  if (interpreter_finalizes()) {
    setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0.1", 0);
    for (;;) pause();
  }
  void (*exits)(void *) = (void (*)(void *))dlsym(RTLD_NEXT, "pthread_exit");
  exits(value);
  __builtin_unreachable();
}
