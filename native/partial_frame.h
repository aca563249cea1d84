// The body of a frame that carries a partial sum: the msgpack array [2, step (u64), exchange (u16), data (bin 32)], always with these widths.
#ifndef MESHLLM_PARTIAL_FRAME_H
#define MESHLLM_PARTIAL_FRAME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { PARTIAL_HEAD = 19 };

static inline void put_big_endian(uint8_t *to, int n, uint64_t value) {
    for (int i = 0; i < n; i++) to[i] = (uint8_t)(value >> (8 * (n - 1 - i)));
}

static inline void partial_head(uint8_t head[PARTIAL_HEAD], uint64_t step, uint32_t exchange, size_t size) {
    memcpy(head, "\x94\x02\xcf", 3);
    put_big_endian(head + 3, 8, step);
    head[11] = 0xcd;
    put_big_endian(head + 12, 2, exchange);
    head[14] = 0xc6;
    put_big_endian(head + 15, 4, size);
}

static inline bool is_partial(const uint8_t *body, size_t n) {
    return n >= PARTIAL_HEAD && !memcmp(body, "\x94\x02\xcf", 3) && body[11] == 0xcd && body[14] == 0xc6;
}
#endif
