// Every kernel but the products (test_matmul.c), of every instruction set that runs here: whole numbers equal those of plain C bit
// by bit, floats are near a formula in double. Lengths around the vectors' widths, on buffers that end at guard pages.
#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "blocks.h"
#include "check.h"
#include "dispatch.h"

static const double SUM_ERROR = 1e-5;     // of a sum, relative to the magnitudes of its terms
static const double EXP_ERROR = 1e-6;     // of exp: 2 ulp, and what is done with it
static const size_t lengths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 576};
enum { N_LENGTHS = sizeof lengths / sizeof *lengths };

static const float specials[] = {0, -0.0f, 1, -1, 1e-45f, 1e-38f, 6e-8f, 65504, 65520, -65520, 1e30f, -1e30f, FLT_MAX, INFINITY, -INFINITY, NAN};
enum { N_SPECIALS = sizeof specials / sizeof *specials };

static struct guarded floats(size_t n, float magnitude, uint64_t *seed) {
    struct guarded g = guarded_new(n * 4);
    for (size_t i = 0; i < n; i++) ((float *)g.data)[i] = magnitude * noise_float(seed);
    return g;
}
static float *f32(const struct guarded *g) { return (float *)g->data; }
static uint16_t *u16(const struct guarded *g) { return (uint16_t *)g->data; }

static void check_near(double got, double expected, double error, const char *name, const char *what, size_t at) {
    if (isnan(expected) ? isnan(got) : isinf(expected) ? got == expected : fabs(got - expected) <= error) return;
    CHECK(0, "%s %s, value %zu: %.9g, expected %.9g +- %g", name, what, at, got, expected, error);
}

// --- conversions -------------------------------------------------------------------------------------------------------

static void check_f16(const struct kernels *k, uint64_t *seed) {
    enum { ALL = 65536 };
    struct guarded half = guarded_new(ALL * 2), full = guarded_new(ALL * 4);
    for (size_t i = 0; i < ALL; i++) u16(&half)[i] = (uint16_t)i;
    k->from_f16(f32(&full), ALL, u16(&half));
    for (size_t i = 0; i < ALL; i++) {
        float expected = f32_of_f16((uint16_t)i), got = f32(&full)[i];
        CHECK(isnan(expected) ? isnan(got) : !memcmp(&got, &expected, 4), "%s from_f16 %zx", k->name, i);
    }
    for (size_t round = 0; round < 16; round++) {
        for (size_t i = 0; i < ALL; i++) { // halves, and their neighbours half a step and an ulp away; then any bits
            uint32_t bits = (uint32_t)noise(seed);
            float value = f32_of_f16((uint16_t)i);
            if (round < 4 && isfinite(value)) {
                memcpy(&bits, &value, 4);
                bits += round == 0 ? 0 : 0x1000 + (uint32_t)round - 2;
            }
            memcpy(f32(&full) + i, &bits, 4);
        }
        k->to_f16(u16(&half), ALL, f32(&full));
        for (size_t i = 0; i < ALL; i++) {
            float value = f32(&full)[i];
            uint16_t got = u16(&half)[i], expected = f16_of_f32(value);
            CHECK(isnan(value) ? isnan(f32_of_f16(got)) : got == expected, "%s to_f16 %a: %x, expected %x", k->name, (double)value, got, expected);
        }
    }
    guarded_free(&half), guarded_free(&full);
    for (size_t l = 0; l < N_LENGTHS; l++) {
        struct guarded in = floats(lengths[l], 100, seed), out = guarded_new(lengths[l] * 2);
        k->to_f16(u16(&out), lengths[l], f32(&in));
        k->from_f16(f32(&in), lengths[l], u16(&out));
        guarded_free(&in), guarded_free(&out);
    }
}

// The rule in plain words: scale = largest / 127, values = round-half-even(x * 127 / largest).
static float expected_block(int8_t *values, int32_t *sum, const float *in) {
    float largest = 0;
    for (size_t i = 0; i < MESHLLM_BLOCK && !isnan(largest); i++) largest = isnan(in[i]) ? NAN : fmaxf(largest, fabsf(in[i]));
    float inverse = 127 / largest;
    bool whole = isfinite(largest) && isfinite(inverse);
    *sum = 0;
    for (size_t i = 0; i < MESHLLM_BLOCK; i++) *sum += values[i] = whole ? (int8_t)lrintf(in[i] * inverse) : 0;
    float scale = isinf(inverse) ? 0 : largest / 127; // largest is zero or nearly so
    return isfinite(scale) && scale > 65504 ? 65504 : f32_of_f16(f16_of_f32(scale));
}

static void check_quantized(const struct kernels *k, size_t n, const float *in) {
    struct guarded values = guarded_new(n), scales = guarded_new(n / 8), sums = guarded_new(n / 8);
    k->quantize((int8_t *)values.data, f32(&scales), (int32_t *)sums.data, n, in);
    for (size_t b = 0; b < n / MESHLLM_BLOCK; b++) {
        int8_t expected[MESHLLM_BLOCK];
        int32_t sum;
        float scale = expected_block(expected, &sum, in + b * MESHLLM_BLOCK), got = f32(&scales)[b];
        CHECK(isnan(scale) ? isnan(got) : got == scale, "%s quantize: scale %g, expected %g", k->name, (double)got, (double)scale);
        CHECK(!memcmp(values.data + b * MESHLLM_BLOCK, expected, MESHLLM_BLOCK) && ((int32_t *)sums.data)[b] == sum, "%s quantize", k->name);
    }
    guarded_free(&values), guarded_free(&scales), guarded_free(&sums);
}

static void check_quantize(const struct kernels *k, uint64_t *seed) {
    for (size_t n = 0; n <= 576; n += MESHLLM_BLOCK) {
        struct guarded in = floats(n, 1 + (float)n, seed);
        check_quantized(k, n, f32(&in));
        for (size_t s = 0; s < N_SPECIALS && n; s++) { // one in each block, at any place; then whole blocks of them
            for (size_t b = 0; b < n; b += MESHLLM_BLOCK) f32(&in)[b + noise(seed) % MESHLLM_BLOCK] = specials[s];
            check_quantized(k, n, f32(&in));
        }
        for (size_t i = 0; i < n; i++) f32(&in)[i] = specials[noise(seed) % 5];
        check_quantized(k, n, f32(&in));
        for (size_t i = 0; i < n; i++) f32(&in)[i] = i % MESHLLM_BLOCK ? (float)((int)(i % 9) - 4) + 0.5f : 127; // ties
        check_quantized(k, n, f32(&in));
        guarded_free(&in);
    }
}

// --- rows --------------------------------------------------------------------------------------------------------------

static void check_norm(const struct kernels *k, size_t n, float magnitude, uint64_t *seed) {
    struct guarded in = floats(n, magnitude, seed), weight = floats(n, 2, seed), out = guarded_new(n * 4);
    double squares = 0, eps = (double)1e-5f;
    for (size_t i = 0; i < n; i++) squares += (double)f32(&in)[i] * (double)f32(&in)[i];
    k->rms_norm(f32(&out), n, f32(&in), f32(&weight), 1e-5f);
    for (size_t i = 0; i < n; i++) {
        double expected = (double)f32(&in)[i] / sqrt(squares / (double)n + eps) * (double)f32(&weight)[i];
        check_near((double)f32(&out)[i], expected, fabs(expected) * SUM_ERROR, k->name, "rms_norm", i);
    }
    k->rms_norm(f32(&in), n, f32(&in), f32(&weight), 1e-5f); // in place
    CHECK(!memcmp(in.data, out.data, n * 4), "%s rms_norm in place", k->name);
    guarded_free(&in), guarded_free(&weight), guarded_free(&out);
}

static void check_rope(const struct kernels *k, size_t n_heads, size_t head_dim, size_t n_pairs, uint32_t style, uint64_t *seed) {
    struct guarded x = floats(n_heads * head_dim, 3, seed), angles = guarded_new(n_pairs * 8);
    float *before = malloc(x.size + 1);
    memcpy(before, x.data, x.size);
    for (size_t i = 0; i < n_pairs; i++) {
        double angle = 100 * (double)noise_float(seed);
        f32(&angles)[2 * i] = (float)cos(angle), f32(&angles)[2 * i + 1] = (float)sin(angle);
    }
    k->rope(f32(&x), n_heads, head_dim, n_pairs, f32(&angles), style);
    for (size_t at = 0; at < n_heads * head_dim; at++) {
        size_t i = at % head_dim, pair = style ? i % (n_pairs ? n_pairs : 1) : i / 2, first = style ? pair : 2 * pair, apart = style ? n_pairs : 1;
        double expected = (double)before[at];
        if (i < 2 * n_pairs) {
            double a = (double)before[at - i + first], b = (double)before[at - i + first + apart];
            double c = (double)f32(&angles)[2 * pair], s = (double)f32(&angles)[2 * pair + 1];
            expected = i == first ? a * c - b * s : a * s + b * c;
        }
        check_near((double)f32(&x)[at], expected, i < 2 * n_pairs ? 1e-6 : 0, k->name, "rope", at);
    }
    free(before);
    guarded_free(&x), guarded_free(&angles);
}

static double activated(double x, uint32_t activation) {
    if (isinf(x)) return x > 0 ? x : NAN; // -inf / inf, as the formula has it
    return x / (1 + exp(activation ? -2 * 0.7978845608028654 * (x + 0.044715 * x * x * x) : -x));
}

static void check_gate(const struct kernels *k, size_t n, uint32_t activation, uint64_t *seed) {
    struct guarded in = floats(n, 20, seed), up = floats(n, 3, seed), out = guarded_new(n * 4);
    for (size_t i = 0; i < n; i++)
        if (noise(seed) % 8 == 0) f32(&in)[i] = specials[noise(seed) % N_SPECIALS];
    k->gate(f32(&out), n, f32(&in), f32(&up), activation);
    for (size_t i = 0; i < n; i++) {
        double x = (double)f32(&in)[i], expected = activated(x, activation) * (double)f32(&up)[i];
        if (fabs(x) > 1e20 && x < 0) continue; // huge / inf or huge * 0: 0 or NaN, no crash is all
        if (fabs(expected) > (double)FLT_MAX) continue;
        check_near((double)f32(&out)[i], expected, fabs(expected) * 20 * EXP_ERROR + 1e-30, k->name, activation ? "gelu" : "silu", i);
    }
    guarded_free(&in), guarded_free(&up), guarded_free(&out);
}

static void check_elementwise(const struct kernels *k, size_t n, uint64_t *seed) {
    struct guarded in = floats(n, 5, seed), out = floats(n, 5, seed);
    float *expected = malloc(n * 4 + 1);
    memcpy(expected, out.data, n * 4);
    k->add(f32(&out), n, f32(&in));
    kernels_scalar.add(expected, n, f32(&in));
    k->scale(f32(&out), n, 0.3f, n % 2 ? 0 : 0.25f);
    kernels_scalar.scale(expected, n, 0.3f, n % 2 ? 0 : 0.25f);
    CHECK(!memcmp(expected, out.data, n * 4), "%s add, scale", k->name);
    k->read(in.size, in.data);
    if (in.size) k->read(in.size - 1, in.data + 1);
    free(expected);
    guarded_free(&in), guarded_free(&out);
}

// --- attention ---------------------------------------------------------------------------------------------------------

static double score_of(const float *q, const uint16_t *key, size_t head_dim, double scale, double soft_cap) {
    double score = 0;
    for (size_t i = 0; i < head_dim; i++) score += (double)q[i] * (double)f32_of_f16(key[i]);
    return soft_cap > 0 ? soft_cap * tanh(scale * score / soft_cap) : scale * score;
}

struct cache { // keys and values of a KV head
    size_t head_dim, n;
    struct guarded keys, values;
    double scale, soft_cap;
};

static void check_head(const struct kernels *k, const struct cache *c, const float *q, const float *out) {
    double *weights = malloc(c->n * sizeof *weights), largest = -INFINITY, sum = 0;
    for (size_t p = 0; p < c->n; p++) {
        weights[p] = score_of(q, u16(&c->keys) + p * c->head_dim, c->head_dim, c->scale, c->soft_cap);
        largest = fmax(largest, weights[p]);
    }
    for (size_t p = 0; p < c->n; p++) sum += weights[p] = exp(weights[p] - largest);
    for (size_t i = 0; i < c->head_dim; i++) {
        double expected = 0;
        for (size_t p = 0; p < c->n; p++) expected += weights[p] / sum * (double)f32_of_f16(u16(&c->values)[p * c->head_dim + i]);
        // a score errs by 1e-6 of its magnitude (4 * head_dim * scale at most), its exponential by as much
        check_near((double)out[i], expected, SUM_ERROR + 1e-6 * 4 * (double)c->head_dim * c->scale, k->name, "attention", i);
    }
    free(weights);
}

static void check_attention(const struct kernels *k, size_t head_dim, size_t n_heads, size_t n, float scale, float soft_cap, uint64_t *seed) {
    struct guarded q = floats(n_heads * head_dim, 4, seed), out = guarded_new(n_heads * head_dim * 4);
    struct cache c = {head_dim, n, guarded_new(n * head_dim * 2), guarded_new(n * head_dim * 2), (double)scale, (double)soft_cap};
    for (size_t i = 0; i < n * head_dim; i++) u16(&c.keys)[i] = f16_of_f32(noise_float(seed)), u16(&c.values)[i] = f16_of_f32(noise_float(seed));
    k->attention(f32(&out), head_dim, n_heads, f32(&q), u16(&c.keys), u16(&c.values), n, scale, soft_cap);
    for (size_t h = 0; h < n_heads; h++) check_head(k, &c, f32(&q) + h * head_dim, f32(&out) + h * head_dim);
    guarded_free(&q), guarded_free(&out), guarded_free(&c.keys), guarded_free(&c.values);
}

static void check_attention_shapes(const struct kernels *k, uint64_t *seed) {
    static const size_t dims[] = {1, 7, 8, 31, 64, 80, 128}, positions[] = {1, 2, 7, 63, 64, 65, 129, 500};
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
        for (size_t p = 0; p < sizeof positions / sizeof *positions; p++) {
            check_attention(k, dims[d], 1, positions[p], 0.125f, 0, seed);
            check_attention(k, dims[d], 3, positions[p], 0.125f, 2, seed);
            check_attention(k, dims[d], 1 + (d + p) % 9, positions[p], 10, 0, seed); // one position has all the weight
        }
}

int main(void) {
    uint64_t seed = 2;
    for (uint32_t isa = 0; meshllm_isa_name(isa); isa++) {
        if (!meshllm_isa_runs(isa)) continue;
        const struct kernels *k = dispatch_kernels(meshllm_isa_name(isa));
        check_f16(k, &seed);
        check_quantize(k, &seed);
        check_attention_shapes(k, &seed);
        for (size_t l = 0; l < N_LENGTHS; l++) {
            size_t n = lengths[l];
            check_elementwise(k, n, &seed);
            check_gate(k, n, 0, &seed), check_gate(k, n, 1, &seed);
            if (n) check_norm(k, n, 1, &seed), check_norm(k, n, 1e4f, &seed), check_norm(k, n, 1e-4f, &seed);
            for (uint32_t style = 0; style < 2; style++) check_rope(k, 3, n, n / 2, style, &seed), check_rope(k, 2, n, n / 5, style, &seed);
        }
        printf("kernels %s: all right\n", k->name);
    }
    return 0;
}
