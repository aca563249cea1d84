// Mapped files that are cut short, or whose disk fails, while they are read. Such a read raises SIGBUS, whose default ends the process.
// In a guarded map the pages from there to its end become zeros instead, and are counted: who reads the map asks for the count.
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

#include "meshllm.h"

enum { MAX_MAPS = 16 };

static struct { _Atomic(uintptr_t) begin, end; } maps[MAX_MAPS]; // begin 0: free; written under `changing`, read by the handler
static atomic_flag changing = ATOMIC_FLAG_INIT;
static atomic_ullong lost;
static uintptr_t page_size; // 0 until the handler is there
static struct sigaction previous;

static bool replace_from(uintptr_t at) {
    uintptr_t page = at & ~(page_size - 1);
    for (int i = 0; i < MAX_MAPS; i++) {
        uintptr_t end = maps[i].end;
        if (!maps[i].begin || at < maps[i].begin || at >= end) continue;
        void *zeros = mmap((void *)page, end - page, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (zeros != MAP_FAILED) lost++;
        return zeros != MAP_FAILED;
    }
    return false;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    int saved = errno;
    if (!replace_from((uintptr_t)info->si_addr)) sigaction(SIGBUS, &previous, NULL); // the read is repeated, and ends as it did before
    errno = saved;
}

static bool install(void) {
    if (page_size) return true;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE);
    page_size = size; // before the handler can run
    if (!sigaction(SIGBUS, &action, &previous)) return true;
    page_size = 0;
    return false;
}

static int add(uintptr_t begin, size_t size) {
    if (!install()) return MESHLLM_BAD_ARGUMENT;
    for (int i = 0; i < MAX_MAPS; i++) {
        if (maps[i].begin) continue;
        maps[i].end = begin + (size + page_size - 1) / page_size * page_size;
        maps[i].begin = begin;
        return MESHLLM_OK;
    }
    return MESHLLM_NO_MEMORY;
}

static void lock(void) {
    while (atomic_flag_test_and_set(&changing)) usleep(10);
}

int meshllm_guard_map(const void *map, size_t size) {
    lock();
    int status = add((uintptr_t)map, size);
    atomic_flag_clear(&changing);
    return status;
}

void meshllm_unguard_map(const void *map) {
    lock();
    for (int i = 0; i < MAX_MAPS; i++)
        if (maps[i].begin == (uintptr_t)map) maps[i].begin = 0;
    atomic_flag_clear(&changing);
}

uint64_t meshllm_lost_maps(void) {
    return lost;
}
