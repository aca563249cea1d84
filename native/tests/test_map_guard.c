// Guarded maps: of a file that was cut short the rest reads as zeros and is counted; other maps end the process as ever.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "check.h"
#include "meshllm.h"

static size_t page;

static const uint8_t *map_pages(size_t n_pages, int *file) { // of a file of that many pages, each byte 1
    *file = memfd_create("map guard", 0);
    CHECK(*file >= 0);
    uint8_t *ones = malloc(n_pages * page);
    memset(ones, 1, n_pages * page);
    CHECK(write(*file, ones, n_pages * page) == (ssize_t)(n_pages * page));
    free(ones);
    const uint8_t *map = mmap(NULL, n_pages * page, PROT_READ, MAP_SHARED, *file, 0);
    CHECK(map != MAP_FAILED);
    return map;
}

static uint8_t read_byte(const uint8_t *at) { return *(const volatile uint8_t *)at; }

static void check_cut(void) {
    int file;
    const uint8_t *map = map_pages(4, &file);
    uint64_t before = meshllm_lost_maps();
    CHECK(meshllm_guard_map(map, 4 * page - 5) == MESHLLM_OK); // a file rarely ends with a page
    CHECK(read_byte(map + 3 * page) == 1);
    CHECK(!ftruncate(file, (off_t)page));
    CHECK(read_byte(map + page - 1) == 1 && meshllm_lost_maps() == before);
    CHECK(read_byte(map + 2 * page) == 0 && meshllm_lost_maps() == before + 1);
    CHECK(read_byte(map + 4 * page - 1) == 0 && meshllm_lost_maps() == before + 1, "what follows goes with it");
    CHECK(read_byte(map + page) == 0 && meshllm_lost_maps() == before + 2);
    meshllm_unguard_map(map);
    close(file);
    munmap((void *)map, 4 * page);
}

static void check_unguarded(void) { // the default action, as if there were no guard at all
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        int file;
        setrlimit(RLIMIT_CORE, &(struct rlimit){0});
        signal(SIGBUS, SIG_DFL); // a sanitizer's handler would report; the guard takes its place below
        const uint8_t *guarded = map_pages(1, &file), *map = map_pages(2, &file);
        if (meshllm_guard_map(guarded, page) || ftruncate(file, 0)) _exit(2);
        _exit(3 + read_byte(map));
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS, "status %#x", (unsigned)status);
}

static void check_many(void) {
    int file;
    const uint8_t *map = map_pages(40, &file);
    size_t n = 0;
    while (meshllm_guard_map(map + n * page, page) == MESHLLM_OK) n++;
    CHECK(n == 16, "%zu", n);
    for (size_t i = 0; i < n; i++) meshllm_unguard_map(map + i * page);
    CHECK(meshllm_guard_map(map, page) == MESHLLM_OK);
    meshllm_unguard_map(map);
    close(file);
    munmap((void *)map, 40 * page);
}

int main(void) {
    page = (size_t)sysconf(_SC_PAGESIZE);
    check_unguarded();
    check_cut();
    check_many();
    return 0;
}
