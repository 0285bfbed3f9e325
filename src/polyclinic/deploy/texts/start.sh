#!/bin/sh
# Every start: checks that the kit is as its authority signed it, then @{purpose}.
# First start: installs the packages of requirements.txt into .venv beside this file.
#   --install             only installs
#   --without-hashes      after --install: accepts packages for which the kit has no hash
#   @{other_commands}
set -eu
cd "$(dirname "$0")"
umask 077
stop() {
    echo "$1" >&2
    exit 1
}
again="copy the whole kit again, or ask the coordinator for it"
command -v openssl >/dev/null || stop "openssl is not installed, by which this kit is checked; install it"
openssl x509 -in ca.crt -noout -pubkey >.ca.pub || stop "ca.crt is damaged; $again"
openssl dgst -sha384 -verify .ca.pub -signature MANIFEST.sig MANIFEST >/dev/null 2>&1 ||
    stop "MANIFEST is not signed by the authority of ca.crt; $again"
sums="sha256sum"
command -v sha256sum >/dev/null || sums="shasum -a 256"
$sums -c MANIFEST >.checked 2>/dev/null || stop "$(grep -v ': OK$' .checked | head -n 1): not as the coordinator signed it; $again"
[ ! -e @{key} ] || chmod 600 @{key}
if [ ! -e .venv/polyclinic-@{version} ]; then
    hashes="--require-hashes"
    if ! grep -q -e '@{hashed}' requirements.txt; then
        hashes=""
        [ "${2:-}" = --without-hashes ] || stop "this kit has no hashes of the packages it needs, so that whoever \
controls the package index could change them; ask the coordinator for a kit with hashes (polyclinic provision lock), \
or accept that: sh start.sh --install --without-hashes"
    fi
    echo "this kit is signed by the authority with this fingerprint; compare it by telephone with the coordinator's:"
    openssl x509 -in ca.crt -noout -fingerprint -sha256
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else
"polyclinic needs Python 3.11 or newer; install one, then: PYTHON=/path/to/python3.11 sh start.sh")'
    "$python" -m venv .venv
    .venv/bin/python -m pip install --disable-pip-version-check --only-binary :all: $hashes -r requirements.txt
    touch .venv/polyclinic-@{version}
fi
[ "${1:-}" != --install ] || exit 0
export POLYCLINIC_CACHE="${POLYCLINIC_CACHE:-$PWD/state/cache}"
@{start}
