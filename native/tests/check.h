// What the C tests share: a check that stays on in every build, buffers that end at a guard page, and reproducible noise.
#ifndef MESHLLM_CHECK_H
#define MESHLLM_CHECK_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition, ...)                                             \
    do {                                                                  \
        if (condition) break;                                             \
        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);   \
        fprintf(stderr, " " __VA_ARGS__);                                 \
        fputc('\n', stderr);                                              \
        exit(1);                                                          \
    } while (0)

enum { CANARY = 0xa5 };

struct guarded { // size bytes at data, the byte after them not readable; those of the page before them keep CANARY
    uint8_t *map, *data;
    size_t size, map_size;
};

static inline struct guarded guarded_new(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page) / page * page;
    struct guarded g = {.size = size, .map_size = room + page};
    g.map = mmap(NULL, g.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(g.map != MAP_FAILED, "mmap of %zu bytes", g.map_size);
    CHECK(!mprotect(g.map + room, page, PROT_NONE));
    g.data = g.map + room - size;
    memset(g.map, CANARY, room);
    return g;
}

static inline void guarded_free(struct guarded *g) {
    for (uint8_t *p = g->map; p < g->data; p++) CHECK(*p == CANARY, "written %td bytes before the buffer", g->data - p);
    munmap(g->map, g->map_size);
}

static inline uint64_t noise(uint64_t *state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}
static inline float noise_float(uint64_t *state) { return (float)((double)(noise(state) >> 11) * 0x1p-52 - 1); } // [-1, 1)
#endif
