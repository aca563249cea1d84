// Blocks of a GGUF file, 32 values each, and half precision in plain C. Source: ggml-common.h of ggml.
#ifndef MESHLLM_BLOCKS_H
#define MESHLLM_BLOCKS_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct q4_0_block { // value i = scale * (nibble i - 8); byte i holds nibble i (low) and nibble i + 16 (high)
    uint16_t scale;
    uint8_t nibbles[16];
};
struct q4_1_block { // value i = scale * nibble i + min
    uint16_t scale, min;
    uint8_t nibbles[16];
};
struct q8_0_block { // value i = scale * values[i]
    uint16_t scale;
    int8_t values[32];
};
_Static_assert(sizeof(struct q4_0_block) == 18, "as in the file");
_Static_assert(sizeof(struct q4_1_block) == 20, "as in the file");
_Static_assert(sizeof(struct q8_0_block) == 34, "as in the file");

size_t format_block_size(uint32_t format); // bytes of 32 values in a file; 0 for F32, F16 and unknown formats

static inline float f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    float value;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else { // subnormal: mantissa * 2^-24, exact in f32
        value = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t f16_of_f32(float f) { // round to nearest even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x1ff)); // NaN stays NaN
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { // subnormal: the addition rounds at 2^-24
        float magic;
        memcpy(&magic, &bits, 4);
        magic += 0.5f;
        memcpy(&bits, &magic, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}
#endif
