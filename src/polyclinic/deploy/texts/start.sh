#!/bin/sh
# Every start: checks that this kit is as its authority signed it and that
# nothing was added to it, then @{purpose}.
# First start: installs the packages of requirements.txt into .venv here.
#   --check           only checks
#   --install         only installs, into a new .venv
#     --keep            keeps settings, keys and folders that were made here
#     --without-hashes  accepts packages for which the kit has no hash
#   @{other_commands}
set -eu
# The names here beside those in MANIFEST: folders, files, and those of both that no new kit holds.
folders="@{own_folders}"
files=".venv MANIFEST MANIFEST.sig @{own_files}"
made="@{made}"

stop() {
    printf '%s\n' "$1" >&2
    exit 1
}

case ":$PATH:" in
    *:[!/]*) stop "PATH has an entry that does not begin with /, so that a file of the current folder could run \
instead of a program; take it out of PATH" ;;
esac
unset CDPATH
cd -- "$(dirname -- "$0")"
umask 077
again="copy the whole kit again, or ask the coordinator for it"

check_signed_files() {
    command -v openssl >/dev/null || stop "openssl is not installed, by which this kit is checked; install it"
    key=$(openssl x509 -in ca.crt -noout -pubkey 2>/dev/null) || stop "ca.crt is damaged; $again"
    printf '%s\n' "$key" | openssl dgst -sha384 -verify /dev/stdin -signature MANIFEST.sig MANIFEST >/dev/null 2>&1 ||
        stop "MANIFEST is not signed by the authority of ca.crt; $again"
    sums="sha256sum"
    command -v sha256sum >/dev/null || sums="shasum -a 256"
    checked=$(LC_ALL=C $sums -c MANIFEST 2>/dev/null) ||
        stop "$(printf '%s\n' "$checked" | grep -v ': OK$' | head -n 1): not as the coordinator signed it; $again"
}

# Stops at names that are neither signed nor our own, since pip and Python could take them for theirs; and at links.
check_other_names() {
    known=$(cut -b 67- MANIFEST; printf '%s\n' $files)
    found=""
    for name in * .[!.]* ..?*; do
        [ -e "$name" ] || [ -L "$name" ] || continue
        case " $folders " in *" $name "*) continue ;; esac
        case "
$known
" in *"
$name
"*) [ -L "$name" ] || continue ;; esac
        found="$found, $name"
    done
    [ -z "$found" ] || stop "not of the signed kit, or links: $(printf %s "${found#, }" | LC_ALL=C tr -c '[:print:]' '?'); \
move them elsewhere (recipes into the folder recipes), and tell the coordinator if they came with the kit"
}

check_new_kit() {
    for name in $made; do
        if [ -e "$name" ] || [ -L "$name" ]; then
            stop "$name is here already; if it was made here: sh start.sh --install --keep; if it came with the kit, \
remove it and tell the coordinator"
        fi
    done
    [ "$(cat DELIVERED)" = "$(cat @{settings})" ] || stop "@{settings} is not as the coordinator made it (see: diff \
DELIVERED @{settings}); if it was changed here: sh start.sh --install --keep; else $again"
}

# Two numbers of .venv that whoever made a zip elsewhere does not know; nothing if it is none.
mark_venv() {
    stat -c '%i %W' .venv/pyvenv.cfg 2>/dev/null || stat -f '%i %B' .venv/pyvenv.cfg 2>/dev/null || true
}

install_packages() {
    case " $* " in
        *" --keep "*) ;;
        *) check_new_kit ;;
    esac
    hashes="--require-hashes"
    if ! grep -q -e '@{hashed}' requirements.txt; then
        hashes=""
        case " $* " in
            *" --without-hashes "*) ;;
            *) stop "this kit has no hashes of the packages it needs, so that whoever \
controls the package index could change them; ask the coordinator for a kit with hashes (polyclinic provision lock), \
or accept that: sh start.sh --install --without-hashes" ;;
        esac
    fi
    echo "this kit is signed by the authority with this fingerprint; compare it by telephone with the coordinator's:"
    openssl x509 -in ca.crt -noout -fingerprint -sha256
    if [ -e .venv ]; then
        echo "removing the folder .venv that is here, and making it anew"
        rm -rf .venv
    fi
    python=${PYTHON:-python3}
    "$python" -I -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else
"polyclinic needs Python 3.11 or newer; install one, then: PYTHON=/path/to/python3.11 sh start.sh --install")'
    "$python" -I -m venv .venv
    .venv/bin/python -I -m pip install --disable-pip-version-check --only-binary :all: $hashes -r requirements.txt
    [ -e .venv/bin/polyclinic ] || stop "pip has installed elsewhere than into .venv; look for target, prefix, root or \
user in pip's settings (.venv/bin/python -m pip config list), then: sh start.sh --install"
    mark_venv >.venv/polyclinic-@{version}
}

check_signed_files
check_other_names
[ ! -e @{key} ] || chmod 600 @{key}
case "${1:-}" in
    --check) exit 0 ;;
    --install)
        install_packages "$@"
        exit 0
        ;;
esac
if [ ! -e .venv ]; then
    install_packages
elif [ -z "$(mark_venv)" ] || [ "$(cat .venv/polyclinic-@{version} 2>/dev/null)" != "$(mark_venv)" ]; then
    stop ".venv was not made here by this kit, or not to its end; make it anew: sh start.sh --install --keep"
fi
export POLYCLINIC_CACHE="${POLYCLINIC_CACHE:-$PWD/state/cache}"
@{start}
