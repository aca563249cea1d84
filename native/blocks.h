// Blocks of a GGUF file, and half precision in plain C. Source: ggml-common.h of ggml.
//
// A block has 32 values and one scale, or (K) 256 values in groups of 32 or 16 with small whole scales, and a scale of those.
#ifndef MESHLLM_BLOCKS_H
#define MESHLLM_BLOCKS_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUPER_BLOCK = 256 };

struct q4_0_block { // value i = scale * (nibble i - 8); byte i holds nibble i (low) and nibble i + 16 (high)
    uint16_t scale;
    uint8_t nibbles[16];
};
struct q4_1_block { // value i = scale * nibble i + min
    uint16_t scale, min;
    uint8_t nibbles[16];
};
struct q5_0_block { // value i = scale * (nibble i + 16 * bit i of high - 16)
    uint16_t scale;
    uint8_t high[4], nibbles[16];
};
struct q5_1_block { // value i = scale * (nibble i + 16 * bit i of high) + min
    uint16_t scale, min;
    uint8_t high[4], nibbles[16];
};
struct q8_0_block { // value i = scale * values[i]
    uint16_t scale;
    int8_t values[32];
};
struct iq4_nl_block { // value i = scale * iq4_nl_values[nibble i]
    uint16_t scale;
    uint8_t nibbles[16];
};
struct q2_k_block { // group j of 16: scale * (low nibble of scales[j]) * q - min * (high nibble of scales[j]); q: two bits each, see q2_k_rows
    uint8_t scales[16], bits[64];
    uint16_t scale, min;
};
struct q3_k_block { // group j of 16: scale * (6 bits of scales - 32) * q; q = two bits - (4 where the bit in high is 0)
    uint8_t high[32], bits[64], scales[12];
    uint16_t scale;
};
struct q4_k_block { // group j of 32: scale * (6 bits) * nibble - min * (6 bits)
    uint16_t scale, min;
    uint8_t scales[12], nibbles[128];
};
struct q5_k_block { // the same with a fifth bit in high
    uint16_t scale, min;
    uint8_t scales[12], high[32], nibbles[128];
};
struct q6_k_block { // group j of 16: scale * scales[j] * (nibble + 16 * two bits of high - 32)
    uint8_t nibbles[128], high[64];
    int8_t scales[16];
    uint16_t scale;
};
_Static_assert(sizeof(struct q4_0_block) == 18 && sizeof(struct q4_1_block) == 20 && sizeof(struct q5_0_block) == 22, "as in the file");
_Static_assert(sizeof(struct q5_1_block) == 24 && sizeof(struct q8_0_block) == 34 && sizeof(struct iq4_nl_block) == 18, "as in the file");
_Static_assert(sizeof(struct q2_k_block) == 84 && sizeof(struct q3_k_block) == 110 && sizeof(struct q4_k_block) == 144, "as in the file");
_Static_assert(sizeof(struct q5_k_block) == 176 && sizeof(struct q6_k_block) == 210, "as in the file");

extern const int8_t iq4_nl_values[16];

static inline float f32_of_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

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
