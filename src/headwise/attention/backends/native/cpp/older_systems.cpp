// Definitions of the few functions that the library would otherwise take from a glibc or libstdc++ newer than those
// that torch's own wheels need (manylinux_2_28). A library compiled on a newer system then runs wherever torch runs.
#include <sstream>

#if defined(__GLIBC__)
// libstdc++ contains these constructors, which torch's headers call, since GCC 9.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();

// Since glibc 2.29 these functions have a second version, which does not set errno.
#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST_VERSION "GLIBC_2.17"
#endif

extern "C" {
// True in a process of one thread, since glibc 2.32. While it is false, shared_ptr counts by atomic operations.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

#if defined(FIRST_VERSION)
__asm__(".symver first_exp2, exp2@" FIRST_VERSION "\n.symver first_log2, log2@" FIRST_VERSION);
__asm__(".hidden exp2\n.hidden log2");
double first_exp2(double x);
double first_log2(double x);
double exp2(double x) { return first_exp2(x); }
double log2(double x) { return first_log2(x); }
#endif
}
#endif
