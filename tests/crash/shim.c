/* Lets chosen calls of the C library fail, and records what a process does to its files.

   LD_PRELOAD loads it into Python. It does nothing before crash_plan has been called:

     COUNT    counts the calls of each function on files below one of the two roots
     FAIL     call number `nth` of function `which` fails with `how` as errno, SHORT does half of
              its work, END_OF_FILE reads nothing
     RECORD   writes each change of a file below the first root to a log, as a record and its data */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, FAIL, RECORD };
enum { SHORT = -1, END_OF_FILE = -2 };
/* the order of FUNCTIONS in faults.py */
enum { OPEN, READ, WRITE, COPY, TRUNCATE, FSYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, FUNCTIONS };

static int mode, which, how, log_fd;
static long nth;
long crash_counts[FUNCTIONS];
static char roots[2][PATH_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void crash_plan(int mode_, const char *root, const char *other, int which_, long nth_, int how_,
                int log_fd_) {
    snprintf(roots[0], PATH_MAX, "%s", root);
    snprintf(roots[1], PATH_MAX, "%s", other);
    memset(crash_counts, 0, sizeof crash_counts);
    which = which_, nth = nth_, how = how_, log_fd = log_fd_;
    mode = mode_;
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int below(const char *path, const char *root) {
    size_t n = strlen(root);
    return n && strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == 0);
}

/* Returns 1 if this call must fail, or (SHORT, END_OF_FILE) must do less. */
static int hit(int function, const char *path) {
    if (mode == OFF || mode == RECORD || !(below(path, roots[0]) || below(path, roots[1])))
        return 0;
    long n = __atomic_add_fetch(&crash_counts[function], 1, __ATOMIC_SEQ_CST);
    if (mode != FAIL || function != which || n != nth) return 0;
    if (how > 0) errno = how;
    return 1;
}

static int recorded(const char *path) { return mode == RECORD && below(path, roots[0]); }

static void of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void of_name(int dir, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    char base[PATH_MAX];
    if (dir == AT_FDCWD) {
        if (!getcwd(base, PATH_MAX)) base[0] = 0;
    } else
        of_fd(dir, base);
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
}

static void put(const void *data, size_t n) {
    REAL(write);
    for (size_t done = 0; done < n;) {
        ssize_t wrote = real(log_fd, (const char *)data + done, n - done);
        if (wrote <= 0) abort();
        done += wrote;
    }
}

/* Appends a record: five numbers, two paths, and the bytes of the file at `at`. */
static void record(int function, const char *path, const char *to, int64_t at, int64_t size) {
    int before = errno;
    int64_t head[5] = {function, at, size, strlen(path), strlen(to)};
    put(head, sizeof head);
    put(path, head[3]);
    put(to, head[4]);
    if (function == WRITE && size) {
        char *data = malloc(size);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        REAL(pread);
        if (!data || fd < 0 || real(fd, data, size, at) != size) abort();
        close(fd);
        put(data, size);
        free(data);
    }
    errno = before;
}

/* ------------------------------------------------------------------------------- names */

static int do_open(int dir, const char *name, int flags, mode_t bits) {
    REAL(openat);
    if (mode == OFF) return real(dir, name, flags, bits);
    char path[PATH_MAX];
    of_name(dir, name, path);
    if (hit(OPEN, path)) return -1;
    if (!recorded(path) || !(flags & (O_CREAT | O_TRUNC))) return real(dir, name, flags, bits);
    pthread_mutex_lock(&lock);
    int fd = real(dir, name, flags, bits);
    if (fd >= 0) record(OPEN, path, "", 0, (flags & O_TRUNC) != 0);
    pthread_mutex_unlock(&lock);
    return fd;
}

#define BITS                                                                                       \
    va_list more;                                                                                  \
    va_start(more, flags);                                                                         \
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                        \
    va_end(more)
int open(const char *name, int flags, ...) { BITS; return do_open(AT_FDCWD, name, flags, bits); }
int open64(const char *name, int flags, ...) { BITS; return do_open(AT_FDCWD, name, flags, bits); }
int openat(int dir, const char *name, int flags, ...) { BITS; return do_open(dir, name, flags, bits); }
int openat64(int dir, const char *name, int flags, ...) { BITS; return do_open(dir, name, flags, bits); }

/* A call on the file `path`, which may move it to `to`. */
#define CHANGES(function, path, to, call)                                                          \
    if (hit(function, path)) return -1;                                                            \
    if (!recorded(path)) return call;                                                              \
    pthread_mutex_lock(&lock);                                                                     \
    int result = call;                                                                             \
    if (result == 0) record(function, path, to, 0, 0);                                             \
    pthread_mutex_unlock(&lock);                                                                   \
    return result

int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat);
    if (mode == OFF) return real(a, from, b, to);
    char path[PATH_MAX], there[PATH_MAX];
    of_name(a, from, path);
    of_name(b, to, there);
    CHANGES(RENAME, path, there, real(a, from, b, to));
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int link(const char *from, const char *to) {
    REAL(link);
    CHANGES(LINK, from, to, real(from, to));
}

int unlinkat(int dir, const char *name, int flags) {
    REAL(unlinkat);
    if (mode == OFF) return real(dir, name, flags);
    char path[PATH_MAX];
    of_name(dir, name, path);
    CHANGES(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, "", real(dir, name, flags));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int dir, const char *name, mode_t bits) {
    REAL(mkdirat);
    if (mode == OFF) return real(dir, name, bits);
    char path[PATH_MAX];
    of_name(dir, name, path);
    CHANGES(MKDIR, path, "", real(dir, name, bits));
}
int mkdir(const char *name, mode_t bits) { return mkdirat(AT_FDCWD, name, bits); }

/* ------------------------------------------------------------------------------- bytes */

#define OF_FD                                                                                      \
    char path[PATH_MAX];                                                                           \
    of_fd(fd, path)

/* A read of `size` bytes; `call` uses `size`. */
#define READS(call)                                                                                \
    if (mode == OFF) return call;                                                                  \
    OF_FD;                                                                                         \
    if (hit(READ, path)) {                                                                         \
        if (how > 0) return -1;                                                                    \
        if (how == END_OF_FILE) return 0;                                                          \
        size = (size + 1) / 2;                                                                     \
    }                                                                                              \
    return call

ssize_t read(int fd, void *to, size_t size) { REAL(read); READS(real(fd, to, size)); }
ssize_t pread(int fd, void *to, size_t size, off_t at) { REAL(pread); READS(real(fd, to, size, at)); }
ssize_t pread64(int fd, void *to, size_t size, off_t at) { return pread(fd, to, size, at); }

/* mckpt reads into one buffer at a time */
ssize_t preadv2(int fd, const struct iovec *to, int num, off_t at, int flags) {
    REAL(preadv2);
    struct iovec part = *to;
    size_t size = num == 1 ? to->iov_len : 0;
    READS((part.iov_len = size, real(fd, num == 1 ? &part : to, num, at, flags)));
}
ssize_t preadv64v2(int fd, const struct iovec *to, int num, off_t at, int flags) {
    return preadv2(fd, to, num, at, flags);
}
ssize_t preadv(int fd, const struct iovec *to, int num, off_t at) { return preadv2(fd, to, num, at, 0); }
ssize_t preadv64(int fd, const struct iovec *to, int num, off_t at) { return preadv2(fd, to, num, at, 0); }

/* A write of `size` bytes at `at`, or (-1) at the file's own offset. */
#define WRITES(function, place, call)                                                              \
    if (mode == OFF) return call;                                                                  \
    OF_FD;                                                                                         \
    if (hit(function, path)) {                                                                     \
        if (how > 0) return -1;                                                                    \
        size = (size + 1) / 2;                                                                     \
    }                                                                                              \
    if (!recorded(path)) return call;                                                              \
    pthread_mutex_lock(&lock);                                                                     \
    off_t start = (place) >= 0 ? (place) : lseek(fd, 0, SEEK_CUR);                                 \
    ssize_t done = call;                                                                           \
    if (done > 0) record(WRITE, path, "", start, done);                                            \
    pthread_mutex_unlock(&lock);                                                                   \
    return done

ssize_t write(int fd, const void *from, size_t size) {
    REAL(write);
    WRITES(WRITE, (off_t)-1, real(fd, from, size));
}
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) {
    REAL(pwrite);
    WRITES(WRITE, at, real(fd, from, size, at));
}
ssize_t pwrite64(int fd, const void *from, size_t size, off_t at) { return pwrite(fd, from, size, at); }

ssize_t copy_file_range(int in, off_t *from, int fd, off_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    off_t at = to ? *to : -1;
    WRITES(COPY, at, real(in, from, fd, to, size, flags));
}
ssize_t sendfile(int fd, int in, off_t *from, size_t size) {
    ssize_t (*real)(int, int, off_t *, size_t) = dlsym(RTLD_NEXT, "sendfile");
    WRITES(COPY, (off_t)-1, real(fd, in, from, size));
}
ssize_t sendfile64(int fd, int in, off_t *from, size_t size) { return sendfile(fd, in, from, size); }

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (mode == OFF) return real(fd, size);
    OF_FD;
    if (hit(TRUNCATE, path)) return -1;
    if (!recorded(path)) return real(fd, size);
    pthread_mutex_lock(&lock);
    int result = real(fd, size);
    if (result == 0) record(TRUNCATE, path, "", 0, size);
    pthread_mutex_unlock(&lock);
    return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int truncate(const char *path, off_t size) {
    REAL(truncate);
    if (hit(TRUNCATE, path)) return -1;
    if (!recorded(path)) return real(path, size);
    pthread_mutex_lock(&lock);
    int result = real(path, size);
    if (result == 0) record(TRUNCATE, path, "", 0, size);
    pthread_mutex_unlock(&lock);
    return result;
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }

int fsync(int fd) {
    REAL(fsync);
    if (mode == OFF) return real(fd);
    OF_FD;
    CHANGES(FSYNC, path, "", real(fd));
}
int fdatasync(int fd) { return fsync(fd); }
