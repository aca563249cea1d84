// Advanced SIMD with SDOT (Raspberry Pi 5, most ARMv8.2 and later). Compiled with -march=armv8.2-a+dotprod, this file alone.
#if defined(__aarch64__)
#include "body/neon_sdot.h"

#define dot_blocks sdot_blocks
#include "body/bodies.h"
KERNELS_TABLE(kernels_neon_dotprod, "neon-dotprod")
#else
typedef int no_neon_dotprod_here; // ISO C forbids an empty file
#endif
