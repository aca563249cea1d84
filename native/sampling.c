// Candidates of a range of the vocabulary: the best logits, the sum of their exponentials, and random noise that depends on nothing
// but (seed, position, token id), so that ranks which hold different ranges draw what one rank alone would have drawn.
//
// Gumbel-max: argmax over i of logits[i] / T + g[i], with g Gumbel(0, 1), is distributed as softmax(logits / T) (Gumbel 1954; see
// Maddison et al., "A* Sampling", 2014), and an argmax can be taken range by range.
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "meshllm.h"

// --- log-sum-exp -----------------------------------------------------------------------------------------------------

// e^x for x in [-87, 0] to 2 ulp: 2^n * e^r with |r| <= ln(2) / 2 by the polynomial of Cephes' expf. Without branches or calls, so
// that compilers vectorize the loop and every machine gives the same value.
static inline float exp_of_negative(float x) {
    float n = (float)(int32_t)(x * 1.44269504088896341f - 0.5f); // x <= 0: rounds half away from 0
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) * (1 << 23)};
    return y * power.value;
}

static float largest(uint32_t n, const float *logits) { // NaN is skipped; -INFINITY if there is nothing else
    float best = -INFINITY;
    for (uint32_t i = 0; i < n; i++) best = logits[i] > best ? logits[i] : best;
    return best;
}

double meshllm_log_sum_exp(uint32_t n, const float *logits) {
    enum { RUN = 256 }; // values summed in float before they go to the double
    float best = largest(n, logits);
    if (isinf(best)) return best;
    double sum = 0;
    for (uint32_t start = 0; start < n; start += RUN) {
        float lanes[8] = {0};
        uint32_t end = n - start < RUN ? n : start + RUN, i = start;
        for (; i + 8 <= end; i += 8) {
            for (uint32_t k = 0; k < 8; k++) {
                float x = logits[i + k] - best;
                lanes[k] += x > -87.0f ? exp_of_negative(x > -87.0f ? x : -87.0f) : 0.0f;
            }
        }
        for (; i < end; i++) lanes[0] += logits[i] - best > -87.0f ? exp_of_negative(logits[i] - best) : 0.0f;
        for (uint32_t k = 0; k < 8; k++) sum += lanes[k];
    }
    return (double)best + log(sum);
}

// --- the k largest ---------------------------------------------------------------------------------------------------

struct heap { // a binary heap in the caller's arrays; its root is the worst: lowest value, and of equal ones the highest index
    uint32_t *indices;
    float *values;
};

static bool is_worse(const struct heap *h, uint32_t a, uint32_t b) {
    return h->values[a] < h->values[b] || (h->values[a] == h->values[b] && h->indices[a] > h->indices[b]);
}

static void swap(struct heap *h, uint32_t a, uint32_t b) {
    uint32_t index = h->indices[a];
    float value = h->values[a];
    h->indices[a] = h->indices[b], h->values[a] = h->values[b];
    h->indices[b] = index, h->values[b] = value;
}

static void sift_down(struct heap *h, uint32_t size, uint32_t at) {
    for (;;) {
        uint32_t worst = at, left = 2 * at + 1;
        if (left < size && is_worse(h, left, worst)) worst = left;
        if (left + 1 < size && is_worse(h, left + 1, worst)) worst = left + 1;
        if (worst == at) return;
        swap(h, at, worst);
        at = worst;
    }
}

static void sift_up(struct heap *h, uint32_t at) {
    while (at && is_worse(h, at, (at - 1) / 2)) {
        swap(h, at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
}

uint32_t meshllm_top_k(uint32_t k, uint32_t *indices, float *values, uint32_t n, const float *logits) {
    struct heap heap = {indices, values};
    uint32_t size = 0, i = 0;
    if (!k) return 0;
    for (; i < n && size < k; i++) {
        if (isnan(logits[i])) continue;
        indices[size] = i, values[size] = logits[i];
        sift_up(&heap, size++);
    }
    for (; i < n; i++) {
        if (!(logits[i] > values[0])) continue; // an equal one has the higher index and stays out
        indices[0] = i, values[0] = logits[i];
        sift_down(&heap, size, 0);
    }
    for (uint32_t left = size; left > 1; left--) { // the worst of what is left goes to the end
        swap(&heap, 0, left - 1);
        sift_down(&heap, left - 1, 0);
    }
    return size;
}

// --- noise -----------------------------------------------------------------------------------------------------------

static uint64_t mix(uint64_t z) { // the finalizer of SplitMix64 (Steele, Lea, Flood 2014)
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// The stream of SplitMix64 that belongs to (seed, position); its id-th number belongs to token id.
static uint64_t stream_of(uint64_t seed, uint32_t position) { return mix(mix(seed + 0x9e3779b97f4a7c15u) + position * 0xd1342543de82ef95u); }

static double uniform(uint64_t stream, uint32_t id) { // in (0, 1), never 0 or 1
    uint64_t bits = mix(stream + (id + UINT64_C(1)) * 0x9e3779b97f4a7c15u);
    return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

void meshllm_gumbel(uint64_t seed, uint32_t position, uint32_t n, const uint32_t *ids, double *noise) {
    uint64_t stream = stream_of(seed, position);
    for (uint32_t i = 0; i < n; i++) noise[i] = -log(-log(uniform(stream, ids[i])));
}

uint32_t meshllm_gumbel_argmax(uint64_t seed, uint32_t position, uint32_t first_id, double temperature, uint32_t n, const float *logits, double *value) {
    uint64_t stream = stream_of(seed, position);
    uint32_t winner = MESHLLM_NONE;
    double best = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        double scaled = (double)logits[i] / temperature, u = uniform(stream, first_id + i), need = best - scaled;
        if (isnan(scaled)) continue;
        // To win, noise must exceed need, so -log(u) < e^-need. -log(u) >= 1 - u and, for need > 0, e^-need <= 1 / (1 + need + need^2 / 2):
        // this spares the two logarithms for nearly every token.
        if (need > 0 && (1 - u) * (1 + need + need * need / 2) >= 1) continue;
        double perturbed = scaled - log(-log(u));
        if (winner == MESHLLM_NONE || perturbed > best) winner = i, best = perturbed;
    }
    *value = best;
    return winner;
}
