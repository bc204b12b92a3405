/* A stand-in for NVIDIA's driver, without a GPU.  It is built as libcuda.so.1 and libnvidia-ml.so.1 and put first on
   LD_LIBRARY_PATH.  With it, tests see which processes start CUDA, and what a program prints if the driver fails.

   Each call adds a line to the file $STUB_LOG: process, parent process, function.  libnvidia-ml reports one GPU.  Then
   CUDA fails: cuInit returns $STUB_INIT, and the driver's version is $STUB_VERSION.  If cuInit succeeds, the functions
   that are called after it fail.  */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *function) {
    char line[200];
    int length = snprintf(line, sizeof line, "%d %d %s\n", getpid(), getppid(), function);
    int file = open(getenv("STUB_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, line, length) != length) abort();
    close(file);
}

static int number(const char *variable) { return atoi(getenv(variable)); }

static int other(void) { note("another function"); return 999; } /* CUDA_ERROR_UNKNOWN */

int cuInit(unsigned flags) { note("cuInit"); return number("STUB_INIT"); }

int cuDriverGetVersion(int *version) { note("cuDriverGetVersion"); *version = number("STUB_VERSION"); return 0; }

/* CUDA's runtime asks for undocumented tables.  500 is CUDA_ERROR_NOT_FOUND. */
int cuGetExportTable(const void **table, const void *id) { note("cuGetExportTable"); return 500; }

/* The runtime gets every function from this one. */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    *function = !strcmp(name, "cuInit") ? (void *)cuInit
              : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
              : !strcmp(name, "cuGetExportTable") ? (void *)cuGetExportTable
              : !strncmp(name, "cuGetProcAddress", 16) ? (void *)cuGetProcAddress_v2
              : (void *)other;
    if (status) *status = 0;
    return 0;
}

int nvmlInit(void) { note("nvmlInit"); return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { note("nvmlDeviceGetCount_v2"); *count = 1; return 0; }
