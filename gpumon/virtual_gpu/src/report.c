/* What the virtual GPU tells its user on stderr: what it cannot do, and results whose shape it could not know. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "gpu.h"

#define MAX_SAID 512
#define MAX_FRAMES 96

static pthread_mutex_t said_mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *said[MAX_SAID];
static int said_count;

/* Whether this is the first time; beyond the table's end everything counts as said. */
static int first_time(const char *text) {
  int first = 1;
  pthread_mutex_lock(&said_mutex);
  for (int i = 0; i < said_count && first; i++) first = strcmp(said[i], text) != 0;
  if (first && said_count < MAX_SAID) said[said_count++] = strdup(text);
  else first = 0;
  pthread_mutex_unlock(&said_mutex);
  return first;
}

void vgpu_trace(const char *format, ...) {
  static int level = -1;
  if (level < 0) level = atoi(setting("VGPU_TRACE", "0"));
  if (level < 1) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("[virtual GPU] ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

int vgpu_unsupported(const char *name, int status) {
  if (first_time(name)) fprintf(stderr, "[virtual GPU] %s is not supported\n", name);
  return status;
}

/* "_ZN2at4_ops7nonzero4callERKNS_6TensorE" -> "nonzero": every operator of ATen has such an entry, and exports it. */
static int operator_name(const char *symbol, char *name, size_t size) {
  static const char prefix[] = "_ZN2at4_ops";
  if (strncmp(symbol, prefix, sizeof prefix - 1)) return 0;
  char *end;
  size_t length = strtoul(symbol + sizeof prefix - 1, &end, 10);
  if (!length || length >= size || strlen(end) < length) return 0;
  memcpy(name, end, length);
  name[length] = 0;
  return 1;
}

/* Operators whose caller asked for the value itself, or that only decide what no shape depends on. */
static const char *const readers[] = {"item",    "_local_scalar_dense", "is_nonzero",      "equal",         "allclose",
                                      "copy_",   "_to_copy",            "to_dtype_layout", "to_device",     "to_dtype",
                                      "to_other", "_assert_async",      "clone",           "contiguous",    "cpu"};

static const char *const shapes[] = {"nonzero",           "masked_select",          "_unique",   "_unique2",
                                     "unique_dim",        "unique_consecutive",     "bincount",  "repeat_interleave_Tensor",
                                     "_coalesce",         "unique_dim_consecutive", "to_sparse", "_to_sparse",
                                     "nonzero_static",    "index_put_",             "index_Tensor"};

#define CONTAINS(list, name) contains(list, sizeof list / sizeof *list, name)

static int contains(const char *const *list, size_t count, const char *name) {
  for (size_t i = 0; i < count; i++) {
    if (!strcmp(list[i], name)) return 1;
  }
  return 0;
}

static void report_read(const char *name) {
  char text[200];
  const char *said_of_shapes = "the shape of %s depends on values, which are not computed: it came out empty";
  const char *said_of_others = "%s decided by a value that is not computed: it saw zero";
  snprintf(text, sizeof text, CONTAINS(shapes, name) ? said_of_shapes : said_of_others, name);
  if (first_time(text)) fprintf(stderr, "[virtual GPU] %s\n", text);
}

/* The innermost operator that did not read for its caller's sake is the one that uses the value. */
void vgpu_note_read(void) {
  void *frames[MAX_FRAMES];
  int count = backtrace(frames, MAX_FRAMES);
  for (int i = 0; i < count; i++) {
    Dl_info info;
    char name[80];
    if (!dladdr(frames[i], &info) || !info.dli_sname) continue;
    if (!operator_name(info.dli_sname, name, sizeof name) || CONTAINS(readers, name)) continue;
    report_read(name);
    return;
  }
}
