#ifndef MESHLLM_DISPATCH_H
#define MESHLLM_DISPATCH_H
#include "kernels.h"

// The kernels of that name, or the best for ""; NULL if they are not compiled in or do not run here.
const struct kernels *dispatch_kernels(const char *name);
#endif
