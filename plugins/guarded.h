#pragma once

// The one way into and out of every plugin method: no exception crosses `noexcept`, and every refusal says which
// method refused and why. Messages go to standard error because TensorRT's logger has another vtable in 10.x than in
// 11.x: a library that serves both never calls it.

#include <exception>

namespace wmtp::plugin
{

//! Writes "[wmtp] WindowedDraftAttention::<method>: <message>" to standard error.
void report(char const* method, char const* message) noexcept;

//! With WMTP_PLUGIN_TRACE set (debugging; read once), writes one line per call to standard error.
void trace(char const* method) noexcept;

template <typename Result, typename Body>
Result guarded(char const* method, Result onError, Body&& body) noexcept
{
    trace(method);
    try
    {
        return body();
    }
    catch (std::exception const& error)
    {
        report(method, error.what());
    }
    catch (...)
    {
        report(method, "unknown exception");
    }
    return onError;
}

} // namespace wmtp::plugin
