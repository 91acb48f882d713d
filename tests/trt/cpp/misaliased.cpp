// Linked in front of the plugin's aliasedInput (ld --wrap): both rings claim the buffer of ring_k. The builder must
// refuse by name; a plugin that is right cannot show that.

#include <cstdint>

extern "C" int32_t __real__ZN4wmtp6plugin12aliasedInputEi(int32_t outputIndex);

extern "C" int32_t __wrap__ZN4wmtp6plugin12aliasedInputEi(int32_t outputIndex)
{
    return __real__ZN4wmtp6plugin12aliasedInputEi(outputIndex == 2 ? 1 : outputIndex);
}
