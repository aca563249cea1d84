// x86: CPUID says what the CPU does, XCR0 (xgetbv) whether the system saves the registers. aarch64: the kernel says both.
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

bool cpu_has_avx2(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    unsigned wanted = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    if ((c & wanted) != wanted || (xcr0() & 6) != 6) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
bool cpu_has_avx_vnni(void) {
    unsigned a, b, c, d;
    return cpu_has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
bool cpu_has_avx512_vnni(void) {
    unsigned a, b, c, d, wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!cpu_has_avx2() || (xcr0() & 0xe6) != 0xe6) return false; // xmm, ymm, mask, zmm
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted && (c & bit_AVX512VNNI);
}
bool cpu_has_neon(void) { return false; }
bool cpu_has_neon_dotprod(void) { return false; }
bool cpu_has_neon_i8mm(void) { return false; }

#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

bool cpu_has_avx2(void) { return false; }
bool cpu_has_avx_vnni(void) { return false; }
bool cpu_has_avx512_vnni(void) { return false; }
bool cpu_has_neon(void) { return getauxval(AT_HWCAP) & HWCAP_ASIMD; }
bool cpu_has_neon_dotprod(void) { return cpu_has_neon() && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP); }
bool cpu_has_neon_i8mm(void) { return cpu_has_neon_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM); }

#else
bool cpu_has_avx2(void) { return false; }
bool cpu_has_avx_vnni(void) { return false; }
bool cpu_has_avx512_vnni(void) { return false; }
bool cpu_has_neon(void) { return false; }
bool cpu_has_neon_dotprod(void) { return false; }
bool cpu_has_neon_i8mm(void) { return false; }
#endif
