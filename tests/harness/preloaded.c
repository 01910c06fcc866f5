/* Preloaded into services under test: steps of the wall clock, and a disk that takes its time.

   TM_FAULTS names a file of two int64: nanoseconds to add to the wall clock, nanoseconds that each read at a place of
   a file, and each gathered write to one, takes. Tests write it while the processes run. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const volatile int64_t *faults;

__attribute__((constructor)) static void open_faults(void) {
    const char *path = getenv("TM_FAULTS");
    int file = path ? open(path, O_RDONLY) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, 2 * sizeof *faults, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) faults = mapped;
    if (file >= 0) close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int status = real(clock, now);
    if (!status && faults && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * SECOND_NS + now->tv_nsec + faults[0];
        now->tv_sec = ns / SECOND_NS;
        now->tv_nsec = ns % SECOND_NS;
    }
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static void take_time(int file) {
    struct stat what;
    int64_t ns = faults ? faults[1] : 0;
    if (ns && !fstat(file, &what) && S_ISREG(what.st_mode)) {
        struct timespec wait = {ns / SECOND_NS, ns % SECOND_NS};
        nanosleep(&wait, NULL);
    }
}

#define SLOWED(name, parameters, arguments) \
    ssize_t name parameters { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        take_time(file); \
        return real arguments; \
    }

SLOWED(pread64, (int file, void *to, size_t bytes, off64_t at), (file, to, bytes, at))
SLOWED(preadv64v2, (int file, const struct iovec *to, int parts, off64_t at, int flags), (file, to, parts, at, flags))
SLOWED(writev, (int file, const struct iovec *from, int parts), (file, from, parts))
