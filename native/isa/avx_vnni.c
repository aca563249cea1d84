// AVX2 with VNNI on 256 bits (Intel from Alder Lake on, its N100 too; Zen 5). Compiled with -mavx2 -mfma -mf16c -mavxvnni, this file alone. The
// tests compile it with AVX512-VNNI's encoding of the same instruction too, since more machines have that one.
#if defined(__x86_64__)
// Sums in float wait in memory from block to block, since 16 registers do not hold them too; weights are read and unpacked half as often.
#define TILE 8
#include "body/avx2.h"

#ifdef __AVXVNNI__
#define dpbusd _mm256_dpbusd_avx_epi32
#else
#define dpbusd _mm256_dpbusd_epi32
#endif

// dpbusd wants one side unsigned: |w| * sign(w) a; |-128| is 128 as unsigned.
ALWAYS_INLINE vi add_bytes(vi sum, vi w, vi four) { return dpbusd(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(four, w)); }

#include "body/vnni.h"

#include "body/bodies.h"
#ifndef AVX_VNNI_TABLE
#define AVX_VNNI_TABLE kernels_avx_vnni
#endif
KERNELS_TABLE(AVX_VNNI_TABLE, "avx-vnni")
#else
typedef int no_avx_vnni_here; // ISO C forbids an empty file
#endif
