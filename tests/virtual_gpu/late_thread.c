/* Preloaded, this makes sure of what otherwise takes luck: autograd's thread of device 0 still has a node of the graph
 * after backward() has returned, waits for Python to free the hook on it, and wakes up when the program ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static __thread int of_autograd; /* it is no other thread that PyTorch begins here; before 2.5 it has no name */

/* PyTorch has told the program's thread that its backward is done: let that one go on first */
int pthread_cond_signal(pthread_cond_t *condition) {
  int (*signals)(pthread_cond_t *) = (int (*)(pthread_cond_t *))dlsym(RTLD_NEXT, "pthread_cond_signal");
  int status = signals(condition);
  Dl_info caller;
  if (gettid() == getpid() || !dladdr(__builtin_return_address(0), &caller)) return status;
  if (!strstr(caller.dli_fname, "libtorch")) return status;
  of_autograd = 1;
  usleep(50000);
  return status;
}

/* Python's lock is taken, so the thread waits: as on a busy machine, it gets to look again only later */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  int (*waits)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
      (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  int (*ending)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing"); /* Python 3.13 */
  if (!ending) ending = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  if (!of_autograd) return waits(condition, mutex, until);
  pthread_mutex_unlock(mutex);
  for (int i = 0; i < 20000 && !ending(); i++) usleep(1000);
  pthread_mutex_lock(mutex);
  return ETIMEDOUT;
}

/* WITHOUT_MEND=1: the C library's, whatever the virtual GPU has in its place */
void pthread_exit(void *value) {
  void *from = getenv("WITHOUT_MEND") ? dlopen("libpthread.so.0", RTLD_LAZY) : RTLD_NEXT;
  void (*exits)(void *) = (void (*)(void *))dlsym(from, "pthread_exit");
  exits(value);
  __builtin_unreachable();
}
