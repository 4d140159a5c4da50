/* Lets user-mode Linux 6.1 start on processors with AMX: loaded into it with LD_PRELOAD.
 *
 * It keeps a process's registers in a buffer that is smaller than what such a processor has, and Linux accepts
 * them only whole. Here they are read whole, and what the guest knows of them is laid over that. What it does
 * not know is the AMX tiles, which nothing in the guest uses.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

#define NT_X86_XSTATE 0x202

static char whole[1 << 16];

long ptrace(enum __ptrace_request request, ...) {
  static long (*real)(enum __ptrace_request, ...);
  if (!real) real = dlsym(RTLD_NEXT, "ptrace");
  va_list arguments;
  va_start(arguments, request);
  int process = va_arg(arguments, int);
  void *kind = va_arg(arguments, void *);
  void *data = va_arg(arguments, void *);
  va_end(arguments);
  int is_set = request == PTRACE_SETREGSET;
  if ((long)kind != NT_X86_XSTATE || (request != PTRACE_GETREGSET && !is_set))
    return real(request, process, kind, data);

  struct iovec all = {whole, sizeof whole}, *guests = data;
  if (real(PTRACE_GETREGSET, process, kind, &all) < 0) return -1;
  if (guests->iov_len > all.iov_len) guests->iov_len = all.iov_len;
  if (is_set) {
    memcpy(whole, guests->iov_base, guests->iov_len);
    return real(PTRACE_SETREGSET, process, kind, &all);
  }
  memcpy(guests->iov_base, whole, guests->iov_len);
  return 0;
}
