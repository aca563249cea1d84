// What the CPU and the operating system both allow.
#ifndef MESHLLM_CPU_FEATURES_H
#define MESHLLM_CPU_FEATURES_H
#include <stdbool.h>

bool cpu_has_avx2(void);         // AVX2, FMA and F16C, with ymm state saved by the system
bool cpu_has_avx_vnni(void);     // these, and VNNI on ymm registers
bool cpu_has_avx512_vnni(void); // AVX512 F, BW, DQ, VL and VNNI, with zmm and mask state saved by the system
bool cpu_has_neon(void);         // Advanced SIMD
bool cpu_has_neon_dotprod(void); // SDOT and UDOT
bool cpu_has_neon_i8mm(void);    // these, and SMMLA
#endif
