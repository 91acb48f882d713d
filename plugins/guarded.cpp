#include "guarded.h"

#include <cstdio>
#include <cstdlib>

namespace wmtp::plugin
{

void report(char const* method, char const* message) noexcept
{
    std::fprintf(stderr, "[wmtp] WindowedDraftAttention::%s: %s\n", method, message);
}

void trace(char const* method) noexcept
{
    static bool const enabled = std::getenv("WMTP_PLUGIN_TRACE") != nullptr;
    if (enabled)
    {
        std::fprintf(stderr, "[wmtp] trace %s\n", method);
    }
}

} // namespace wmtp::plugin
