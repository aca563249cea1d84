// What every ISA file includes before its primitives.
#ifndef MESHLLM_PRELUDE_H
#define MESHLLM_PRELUDE_H
#include <float.h>
#include <math.h>
#include <string.h>

#include "blocks.h"
#include "kernels.h"
#include "packing.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#ifndef TILE // of 16 registers; a multiple of 4
#define TILE 4 // chains of sums that a product keeps in registers
#endif
#ifndef FLOAT_TILE
#define FLOAT_TILE TILE // tokens of a product of floats, each with two sums
#endif
#endif
